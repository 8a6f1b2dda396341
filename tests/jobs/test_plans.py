"""The ladder down which a job goes when memory runs out."""

from typing import Any

import pytest

from jobs.plans import after_out_of_memory, plan_of, planned


def ladder(gpus: int = 2, **training: Any) -> list[str]:
    """What changes at each rung, down to the last."""
    plan: dict[str, Any] | None = None
    said = []
    while (step := after_out_of_memory(training, plan, gpus)) is not None:
        plan = step.plan
        said.append(step.changes)
    return said


@pytest.mark.parametrize(
    ("gpus", "training", "expected"),
    [
        (
            2,
            {"train_batch_size": 8, "per_device_train_batch_size": 4, "zero_stage": 1},
            [
                "micro-batch 4 -> 2",
                "micro-batch 2 -> 1",
                "activation checkpointing off -> on",
                "stage 1 -> 2",
                "stage 2 -> 3",
            ],
        ),
        # A step has fewer examples than a rank may hold: half of those that it does hold.
        (
            2,
            {"train_batch_size": 8, "per_device_train_batch_size": 64, "per_device_eval_batch_size": 3},
            [
                "micro-batch 64 -> 2, evaluation batch 3 -> 2",
                "micro-batch 2 -> 1, evaluation batch 2 -> 1",
                "activation checkpointing off -> on",
            ],
        ),
        (
            1,
            {"per_device_max_tokens": 5000, "max_length": 2000, "zero_stage": 0},
            [
                "tokens at once 5000 -> 2500",
                "tokens at once 2500 -> 2000",
                "activation checkpointing off -> on",
            ],
        ),
        (1, {"gradient_checkpointing": True, "zero_stage": 0}, []),
    ],
)
def test_each_rung_in_its_order(gpus: int, training: dict[str, Any], expected: list[str]) -> None:
    assert ladder(gpus, **training) == expected


def test_a_plan_leaves_the_result_alone() -> None:
    training = {"train_batch_size": 8, "per_device_train_batch_size": 4, "learning_rate": 1e-3, "seed": 7}
    step = after_out_of_memory(training, None, 1)
    assert step is not None
    assert planned(training, step.plan) == plan_of(training) | training | {"per_device_train_batch_size": 2}
    assert planned(training, None) == training
