import pytest

from zero_core.config.train import TrainConfig


@pytest.mark.parametrize(
    "field", ["max_steps", "train_batch_size", "max_length", "warmup_steps", "eval_samples"]
)
def test_what_no_record_can_hold_is_refused(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field}: 2147483648 must be at most 2147483647"):
        TrainConfig(**{field: 2**31})


def test_the_steps_of_the_most_epochs_can_be_counted() -> None:
    with pytest.raises(ValueError, match="num_train_epochs: 1e\\+300 must be at most 1000000"):
        TrainConfig(num_train_epochs=1e300)
