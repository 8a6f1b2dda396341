"""What a request may say, and what it is told when it may not."""

from typing import Any

import pytest

from jobs.errors import InvalidRequest, ShardyardError, Unprocessable
from jobs.spec import parse_request, train_config
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


def test_the_multiplier_multiplies_the_default_learning_rate() -> None:
    request = parse_request(LEAST | {"hyperparameters": {"learning_rate_multiplier": 2.5}})
    assert train_config(request).learning_rate == 2.5 * TrainConfig.learning_rate


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
        ({"resources": {"gpus": 0}}, "resources.gpus", "greater than or equal to 1"),
        ({"seed": -1}, "seed", "greater than or equal to 0"),
        ({"suffix": "a" * 65}, "suffix", "pattern"),
        ({"suffix": "$(rm)"}, "suffix", "pattern"),
        ({"metadata": {"k" * 65: "v"}}, "metadata", "at most 64 characters"),
        ({"metadata": {str(i): "v" for i in range(17)}}, "metadata", "at most 16"),
        ({"hyperparameters": {"n_epochs": 51}}, "hyperparameters.n_epochs", "can't be used"),
        ({"training": {"zero_stage": 4}}, "training.zero_stage", "4 is not one of 0, 1, 2, 3"),
        ({"training": {"learning_rate": "fast"}}, "training.learning_rate", "valid number"),
        ({"training": {"train_batch_size": 2.5}}, "training.train_batch_size", "valid integer"),
        ({"training": {"learning_rate": float("nan")}}, "training.learning_rate", "not a finite number"),
        ({"training": {"learning_rate": -1.0}}, "training.learning_rate", "at least 0"),
        ({"model": ""}, "model", "at least 1 character"),
    ],
)
def test_a_wrong_field_is_named_with_a_way_out(given: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(
        Unprocessable if "no such field" in words or "did you mean" in words else InvalidRequest
    ) as caught:
        parse_request(LEAST | given)
    assert (caught.value.param or "").startswith(param)
    assert words in caught.value.message


def test_a_missing_field_is_named() -> None:
    with pytest.raises(InvalidRequest, match="training_file: it is required") as caught:
        parse_request({"model": "tiny"})
    assert caught.value.code == "missing_required_parameter"


@pytest.mark.parametrize("method", ["dpo", "reinforcement"])
def test_methods_that_are_not_there_are_refused_clearly(method: str) -> None:
    with pytest.raises(Unprocessable, match="use 'supervised'") as caught:
        parse_request(LEAST | {"method": {"type": method, method: {}}})
    assert isinstance(caught.value, ShardyardError)
    assert caught.value.param == "method.type"
