"""What a request may say, and what it is told when it may not."""

from typing import Any

import pytest

from jobs.errors import InvalidRequest, Unprocessable
from jobs.spec import parse_request, resolve, train_config
from zero_core.config.dpo import DpoConfig
from zero_core.config.lora import LoraConfig
from zero_core.config.train import TrainConfig

LEAST: dict[str, Any] = {"model": "tiny", "training_file": "file-1"}


def test_the_least_request_takes_every_default() -> None:
    assert train_config(parse_request(LEAST)) == TrainConfig()


@pytest.mark.parametrize(
    "given",
    [
        {
            "method": {
                "type": "supervised",
                "supervised": {"hyperparameters": {"n_epochs": 2, "batch_size": 4}},
            }
        },
        {"hyperparameters": {"n_epochs": 2, "batch_size": 4, "learning_rate_multiplier": "auto"}},
        {"training": {"num_train_epochs": 2, "train_batch_size": 4}},
        {"hyperparameters": {"n_epochs": 9, "batch_size": 4}, "training": {"num_train_epochs": 2}},
    ],
)
def test_openais_hyperparameters_and_native_fields_say_the_same(given: dict[str, Any]) -> None:
    config = train_config(parse_request(LEAST | given))
    assert (config.num_train_epochs, config.train_batch_size) == (2, 4)


def dpo(**hyperparameters: Any) -> dict[str, Any]:
    return {"method": {"type": "dpo", "dpo": {"hyperparameters": hyperparameters}}}


MULTIPLIER = {"learning_rate_multiplier": 2.5}
LORA = {"training": {"lora": {}}}


@pytest.mark.parametrize(
    ("given", "rate"),
    [
        ({"hyperparameters": MULTIPLIER}, 2.5e-5),
        ({"hyperparameters": MULTIPLIER} | LORA, 5e-4),
        (dpo(**MULTIPLIER), 2.5e-6),
        (dpo(**MULTIPLIER) | LORA, 2.5e-5),
        ({"hyperparameters": MULTIPLIER, "training": {"method": "dpo"}}, 2.5e-6),
        ({"hyperparameters": MULTIPLIER, "training": {"learning_rate": 1}}, 1),
    ],
)
def test_the_multiplier_multiplies_the_default_of_the_method(given: dict[str, Any], rate: float) -> None:
    assert train_config(parse_request(LEAST | given)).learning_rate == pytest.approx(rate, rel=1e-12)


@pytest.mark.parametrize(
    ("given", "beta"),
    [
        (dpo(beta=0.3), 0.3),
        (dpo(beta="auto"), 0.1),
        ({"method": {"type": "dpo"}}, 0.1),
        ({"method": {"type": "dpo", "dpo": {}, "supervised": None}}, 0.1),
        ({"training": {"method": "dpo", "dpo": {"beta": 0.4}}}, 0.4),
        (dpo(beta=0.3) | {"training": {"method": "dpo", "dpo": {"beta": 0.4}}}, 0.4),
        (dpo(beta=0.3) | {"training": {"dpo": {}}}, 0.3),
    ],
)
def test_dpo_is_asked_for_in_openais_words_and_in_ours(given: dict[str, Any], beta: float) -> None:
    config = train_config(parse_request(LEAST | given))
    assert (config.method, config.dpo, config.num_train_epochs) == ("dpo", DpoConfig(beta), 1)


def test_lora_is_an_object_and_an_empty_one_takes_every_default() -> None:
    assert train_config(parse_request(LEAST | LORA)).lora == LoraConfig()
    given = {"r": 4, "alpha": 8, "target_modules": ["q_proj"], "quantization": "nf4", "merge": True}
    config = train_config(parse_request(LEAST | {"training": {"lora": given}}))
    assert config.lora == LoraConfig(4, 8.0, ("q_proj",), quantization="nf4", merge=True)


@pytest.mark.parametrize(
    "given", [{}, LORA, dpo(beta=0.7), {"training": {"lora": {"target_modules": ["x"]}}}]
)
def test_what_is_resolved_can_be_sent_again(given: dict[str, Any]) -> None:
    request = parse_request(LEAST | given)
    spec = resolve(
        request, model_path="", parameters=1, training_file_path="", validation_file_path=None
    ).model_dump(mode="json")
    assert train_config(parse_request(LEAST | {"training": spec["training"]})) == train_config(request)


AUTO = '"auto" or '
HUGE = 10**308


@pytest.mark.parametrize(
    ("given", "param", "words"),
    [
        ({"modle": "x"}, "modle", "did you mean 'model'"),
        ({"training": {"learning_rat": 1}}, "training.learning_rat", "did you mean 'learning_rate'"),
        ({"resources": {"gpu": 1}}, "resources.gpu", "did you mean 'gpus'"),
        (
            {"method": {"type": "supervised", "supervised": {"hyperparameters": {"epochs": 1}}}},
            "method.supervised.hyperparameters.epochs",
            "did you mean 'n_epochs'",
        ),
        (dpo(betta=1), "method.dpo.hyperparameters.betta", "did you mean 'beta'"),
        ({"training": {"lora": {"lora_alpha": 1}}}, "training.lora.lora_alpha", "did you mean 'alpha'"),
        ({"training": {"lora": {"rank": 1}}}, "training.lora.rank", "no such field; known here: alpha, "),
        ({"training": {"dpo": {"bta": 1}}}, "training.dpo.bta", "did you mean 'beta'"),
        ({"team_id": "team-b"}, "team_id", "no such field"),
        ({"state": "succeeded"}, "state", "no such field"),
        ({"epoch": 4}, "epoch", "no such field"),
    ],
)
def test_an_unknown_field_is_named_with_what_may_be_meant(
    given: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(Unprocessable) as caught:
        parse_request(LEAST | given)
    assert (caught.value.param, caught.value.code) == (param, "unknown_parameter")
    assert words in caught.value.message


@pytest.mark.parametrize(
    ("given", "param", "words"),
    [
        (
            {"resources": {"gpus": 0}},
            "resources.gpus",
            "0 can't be used; it must be an integer from 1 to 1024",
        ),
        ({"resources": 3}, "resources", "an object"),
        ({"seed": -1}, "seed", "an integer from 0 to 2147483647 or null"),
        ({"seed": HUGE}, "seed", "an integer from 0 to 2147483647 or null"),
        ({"suffix": "a" * 65}, "suffix", "a string that matches"),
        ({"suffix": "$(rm)"}, "suffix", "a string that matches"),
        ({"metadata": {"k" * 65: "v"}}, "metadata." + "k" * 65, "at most 64 characters"),
        ({"metadata": {str(i): "v" for i in range(17)}}, "metadata", "at most 16"),
        ({"metadata": {"int": 5}}, "metadata.int", "valid string"),
        ({"metadata": 5}, "metadata", "an object or null"),
        ({"integrations": {}}, "integrations", "a list or null"),
        ({"model": ""}, "model", "at least 1 character"),
        ({"hyperparameters": {"n_epochs": 0}}, "hyperparameters.n_epochs", AUTO + "an integer from 1 to 50"),
        ({"hyperparameters": {"n_epochs": 51}}, "hyperparameters.n_epochs", AUTO + "an integer from 1 to 50"),
        (
            {"hyperparameters": {"n_epochs": "3"}},
            "hyperparameters.n_epochs",
            AUTO + "an integer from 1 to 50",
        ),
        ({"hyperparameters": {"batch_size": True}}, "hyperparameters.batch_size", AUTO + "an integer from 1"),
        (
            {"hyperparameters": {"learning_rate_multiplier": 0}},
            "hyperparameters.learning_rate_multiplier",
            AUTO + "a number greater than 0",
        ),
        (
            dpo(beta=2.5),
            "method.dpo.hyperparameters.beta",
            "2.5 can't be used; it must be " + AUTO + "a number greater than 0 and at most 2",
        ),
        ({"method": "dpo"}, "method", "an object or null"),
        ({"method": {"type": "ppo"}}, "method.type", 'one of "supervised", "dpo"'),
        ({"method": {"type": "dpo", "supervised": {}}}, "method.supervised", "the method.type is 'dpo'"),
        (dpo() | {"training": {"method": "supervised"}}, "training.method", "is not the method.type 'dpo'"),
        ({"training": {"dpo": {"beta": 0.2}}}, "training.dpo", "set method.type to 'dpo'"),
        ({"training": {"zero_stage": 4}}, "training.zero_stage", "4 is not one of 0, 1, 2, 3"),
        ({"training": {"learning_rate": "fast"}}, "training.learning_rate", "a number or null"),
        ({"training": {"learning_rate": float("nan")}}, "training.learning_rate", "not a finite number"),
        ({"training": {"learning_rate": 10 * HUGE}}, "training.learning_rate", "not a finite number"),
        ({"training": {"learning_rate": -1.0}}, "training.learning_rate", "at least 0"),
        (
            {"training": {"train_batch_size": 2.5}},
            "training.train_batch_size",
            "2.5 can't be used; it must be an",
        ),
        ({"training": {"max_steps": HUGE}}, "training.max_steps", "at most 2147483647"),
        ({"training": {"num_train_epochs": 1e300}}, "training.num_train_epochs", "at most 1000000"),
        ({"training": {"packing": 1}}, "training.packing", "true or false"),
        ({"training": {"lora": True}}, "training.lora", "true can't be used; it must be an object or null"),
        ({"training": {"lora": {"r": "8"}}}, "training.lora.r", "an integer"),
        ({"training": {"lora": {"r": 0}}}, "training.lora.r", "0 must be at least 1"),
        (
            {"training": {"lora": {"target_modules": ["a", 5]}}},
            "training.lora.target_modules",
            "list of strings",
        ),
        ({"training": {"lora": {"target_modules": "q"}}}, "training.lora.target_modules", '"all-linear"'),
        (
            {"training": {"lora": {"quantization": "nf3"}}},
            "training.lora.quantization",
            '"nf4", "int8" or null',
        ),
        ({"training": {"dpo": {"beta": 0}}}, "training.dpo.beta", "0.0 must be greater than 0"),
    ],
)
def test_a_wrong_value_is_named_with_what_it_may_be(given: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_request(LEAST | given)
    assert caught.value.param == param
    assert words in caught.value.message
    assert caught.value.message.startswith(f"{param}: ")


def test_a_missing_field_is_named() -> None:
    with pytest.raises(InvalidRequest, match="training_file: it is required") as caught:
        parse_request({"model": "tiny"})
    assert caught.value.code == "missing_required_parameter"


def test_a_method_that_is_not_there_is_refused_clearly() -> None:
    with pytest.raises(Unprocessable, match="use 'supervised' or 'dpo'") as caught:
        parse_request(LEAST | {"method": {"type": "reinforcement", "reinforcement": {}}})
    assert caught.value.param == "method.type"
