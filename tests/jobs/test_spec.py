"""What a request may say, and what it is told when it may not."""

import json
from typing import Any

import pytest
from pydantic import TypeAdapter

from jobs.errors import InvalidRequest, ShardyardError, Unprocessable
from jobs.spec import JobRequest, parse_request, resolve, train_config
from zero_core.config.dpo import DpoConfig
from zero_core.config.train import TrainConfig

UNKNOWN = ("no such field", "did you mean", "known here", "'target_modules'")
RANGE = 'can\'t be used: it must be "auto" or a whole number from 1 to 50'
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


def test_the_multiplier_multiplies_the_default_learning_rate() -> None:
    request = parse_request(LEAST | {"hyperparameters": {"learning_rate_multiplier": 2.5}})
    assert train_config(request).learning_rate == 2.5 * 1e-5


@pytest.mark.parametrize(
    ("training", "peak"),
    [
        ({}, 1e-5),
        ({"method": "dpo"}, 1e-6),
        ({"lora": {}}, 1e-4),
        ({"method": "dpo", "lora": {}}, 1e-5),
        ({"method": "dpo", "learning_rate": 0.5}, 0.5),
        ({"lora": {}, "learning_rate": None}, 1e-4),
    ],
)
def test_each_kind_of_training_has_its_learning_rate(training: dict[str, Any], peak: float) -> None:
    request = parse_request(LEAST | {"training": training})
    assert train_config(request).peak_learning_rate == peak
    assert train_config(request).optimizer_config().lr == peak
    assert resolved(request)["learning_rate"] == peak
    multiplied = LEAST | {"training": training, "hyperparameters": {"learning_rate_multiplier": 2}}
    given = training.get("learning_rate") is not None
    assert train_config(parse_request(multiplied)).peak_learning_rate == (peak if given else 2 * peak)


def test_dpo_comes_from_openais_method_and_from_the_native_field_alike() -> None:
    hyperparameters = {"n_epochs": 2, "batch_size": 4, "learning_rate_multiplier": "auto", "beta": 0.5}
    method = {"type": "dpo", "dpo": {"hyperparameters": hyperparameters}}
    native = {"method": "dpo", "num_train_epochs": 2, "train_batch_size": 4, "dpo": {"beta": 0.5}}
    config = TrainConfig(method="dpo", dpo=DpoConfig(beta=0.5), num_train_epochs=2, train_batch_size=4)
    for given in ({"method": method}, {"training": native}, {"method": method, "training": native}):
        assert train_config(parse_request(LEAST | given)) == config
    overridden = {"method": method, "training": {"dpo": {"beta": 1}}}
    assert train_config(parse_request(LEAST | overridden)).dpo == DpoConfig(beta=1)
    automatic = {"method": {"type": "dpo", "dpo": {"hyperparameters": {"beta": "auto"}}}}
    assert train_config(parse_request(LEAST | automatic)) == TrainConfig(method="dpo")


def test_a_config_survives_the_json_of_its_job_and_of_its_run() -> None:
    lora = {
        "r": 4,
        "target_modules": ["q_proj", "v_proj"],
        "modules_to_save": ["lm_head"],
        "quantization": "nf4",
    }
    training = {"method": "dpo", "dpo": {"beta": 0.3}, "lora": lora, "learning_rate": 1e-3}
    request = parse_request(LEAST | {"training": training})
    stored = json.loads(json.dumps(resolved(request)))
    assert stored["lora"] == {
        "r": 4, "alpha": 32.0, "target_modules": ["q_proj", "v_proj"], "exclude_modules": [],
        "modules_to_save": ["lm_head"], "use_rslora": False, "quantization": "nf4", "merge": False,
    }  # fmt: skip
    # As zero_core.training.run reads it.
    assert TypeAdapter(TrainConfig).validate_python(stored) == train_config(request)
    # And as a person sends it again.
    assert train_config(parse_request(LEAST | {"training": stored})) == train_config(request)


def resolved(request: JobRequest) -> dict[str, Any]:
    spec = resolve(request, model_path="m", parameters=1, training_file_path="t", validation_file_path=None)
    return spec.training


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
        ({"team_id": "team-b"}, "team_id", "no such field"),
        ({"state": "succeeded"}, "state", "no such field"),
        ({"epoch": 4}, "epoch", "no such field"),
        ({"resources": {"gpus": 0}}, "resources.gpus", "it must be a whole number from 1 to 1024"),
        ({"resources": None}, "resources", "it must be an object"),
        ({"seed": -1}, "seed", "it must be a whole number from 0 to 2147483647 or null"),
        ({"seed": 10**300}, "seed", "an integer of more than 20 digits"),
        ({"suffix": "a" * 65}, "suffix", "pattern"),
        ({"suffix": "$(rm)"}, "suffix", "pattern"),
        ({"metadata": {"k" * 65: "v"}}, "metadata", "at most 64 characters"),
        ({"metadata": {str(i): "v" for i in range(17)}}, "metadata", "at most 16"),
        ({"metadata": {"k": 5}}, "metadata.k", "it must be a string"),
        ({"hyperparameters": {"n_epochs": 51}}, "hyperparameters.n_epochs", f"51 {RANGE}"),
        ({"hyperparameters": {"n_epochs": 0}}, "hyperparameters.n_epochs", f"0 {RANGE}"),
        ({"hyperparameters": {"n_epochs": True}}, "hyperparameters.n_epochs", f"true {RANGE}"),
        ({"hyperparameters": {"n_epochs": "x" * 5000}}, "hyperparameters.n_epochs", f"xxx... {RANGE}"),
        (
            {"hyperparameters": {"learning_rate_multiplier": 0}},
            "hyperparameters.learning_rate_multiplier",
            'it must be "auto" or a number above 0',
        ),
        (
            {"method": {"type": "dpo", "dpo": {"hyperparameters": {"beta": 2.5}}}},
            "method.dpo.hyperparameters.beta",
            'it must be "auto" or a number above 0 and at most 2',
        ),
        (
            {"method": {"type": "dpo", "dpo": {"hyperparameters": {"betta": 1}}}},
            "method.dpo.hyperparameters.betta",
            "did you mean 'beta'",
        ),
        ({"method": 5}, "method", "it must be an object or null"),
        ({"method": {"type": "ppo"}}, "method.type", 'it must be "supervised" or "dpo"'),
        ({"method": {"type": "dpo", "supervised": {}}}, "method.supervised", "leave supervised out"),
        ({"method": {"type": "dpo"}, "training": {"method": "supervised"}}, "training.method", "leave one"),
        ({"training": {"dpo": {"beta": 0.5}}}, "training.dpo", "the method is supervised"),
        ({"training": {"dpo": {"beta": 3}, "method": "dpo"}}, "training.dpo.beta", "at most 2"),
        ({"training": {"dpo": {"beta_": 1}}}, "training.dpo.beta_", "did you mean 'beta'"),
        ({"training": {"dpo": None}}, "training.dpo", "null can't be used: it must be an object"),
        ({"training": {"lora": {"ranks": 1, "alfa": 1}}}, "training.lora.ranks", "known here: alpha"),
        ({"training": {"lora": {"target_module": []}}}, "training.lora.target_module", "'target_modules'"),
        (
            {"training": {"lora": {"r": "8"}}},
            "training.lora.r",
            '"8" can\'t be used: it must be a whole number',
        ),
        ({"training": {"lora": {"r": 0}}}, "training.lora.r", "at least 1"),
        ({"training": {"lora": {"use_rslora": 1}}}, "training.lora.use_rslora", "it must be true or false"),
        ({"training": {"lora": {"quantization": "nf5"}}}, "training.lora.quantization", '"nf4" or "int8"'),
        (
            {"training": {"lora": {"target_modules": "q_proj"}}},
            "training.lora.target_modules",
            'it must be a list of strings or "all-linear"',
        ),
        (
            {"training": {"lora": {"exclude_modules": [1]}}},
            "training.lora.exclude_modules",
            "list of strings",
        ),
        ({"training": {"lora": []}}, "training.lora", "it must be an object or null"),
        ({"training": {"max_steps": 10**300}}, "training.max_steps", "it is too large"),
        ({"training": {"optim": "x" * 5000}}, "training.optim", "xxx... is not one of"),
        ({"training": {"zero_stage": 4}}, "training.zero_stage", "4 is not one of 'auto', 0, 1, 2, 3"),
        ({"training": {"learning_rate": "fast"}}, "training.learning_rate", "it must be a number"),
        ({"training": {"train_batch_size": 2.5}}, "training.train_batch_size", "it must be a whole number"),
        ({"training": {"learning_rate": float("nan")}}, "training.learning_rate", "not a finite number"),
        ({"training": {"learning_rate": -1.0}}, "training.learning_rate", "at least 0"),
        ({"model": ""}, "model", "at least 1 character"),
    ],
)
def test_a_wrong_field_is_named_with_a_way_out(given: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(Unprocessable if any(sign in words for sign in UNKNOWN) else InvalidRequest) as caught:
        parse_request(LEAST | given)
    assert (caught.value.param or "").startswith(param)
    assert words in caught.value.message
    assert len(caught.value.message) < 300


def test_a_missing_field_is_named() -> None:
    with pytest.raises(InvalidRequest, match="training_file: it is required") as caught:
        parse_request({"model": "tiny"})
    assert caught.value.code == "missing_required_parameter"


def test_a_method_that_is_not_there_is_refused_clearly() -> None:
    with pytest.raises(Unprocessable, match="use 'supervised' or 'dpo'") as caught:
        parse_request(LEAST | {"method": {"type": "reinforcement", "reinforcement": {}}})
    assert isinstance(caught.value, ShardyardError)
    assert caught.value.param == "method.type"
