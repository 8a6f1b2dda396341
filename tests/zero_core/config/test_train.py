from collections.abc import Mapping
from typing import Any

import pytest

from zero_core.config.lora import LoraConfig
from zero_core.config.train import TrainConfig


@pytest.mark.parametrize(
    ("given", "rate", "epochs"),
    [
        ({}, 1e-5, 3),
        ({"lora": LoraConfig()}, 2e-4, 3),
        ({"method": "dpo"}, 1e-6, 1),
        ({"method": "dpo", "lora": LoraConfig()}, 1e-5, 1),
        ({"method": "dpo", "learning_rate": 0.0, "num_train_epochs": 2.5}, 0, 2.5),
    ],
)
def test_the_method_decides_what_is_not_given(given: Mapping[str, Any], rate: float, epochs: float) -> None:
    config = TrainConfig(**given)
    assert (config.learning_rate, config.num_train_epochs) == (rate, epochs)
    assert config.optimizer_config().lr == rate
    assert config.total_samples(10) == 10 * epochs


@pytest.mark.parametrize(
    "field", ["max_steps", "train_batch_size", "max_length", "warmup_steps", "eval_samples"]
)
def test_what_no_record_can_hold_is_refused(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field}: 2147483648 must be at most 2147483647"):
        TrainConfig(**{field: 2**31})
