"""By which plan an attempt trains: the spec's own at first, and the next cheaper one after an out-of-memory.

A plan changes memory and speed and never the result, so a job goes on from its newest checkpoint by another
one, and its loss curve stays as it would have been.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from pydantic import TypeAdapter

from zero_core.config.train import TrainConfig

_FIELDS = (
    "per_device_train_batch_size",
    "per_device_max_tokens",
    "per_device_eval_batch_size",
    "gradient_checkpointing",
    "zero_stage",
    "offload",
)
"""Of ``TrainConfig``: those that a plan chooses, in the order in which they are spoken of."""

_NAMES = {
    "per_device_train_batch_size": "micro-batch",
    "per_device_max_tokens": "tokens at once",
    "per_device_eval_batch_size": "evaluation batch",
    "gradient_checkpointing": "activation checkpointing",
    "zero_stage": "stage",
    "offload": "offload",
}

NOTHING_CHEAPER = (
    "No cheaper plan is left. Ask for more GPUs, a smaller training.max_length, or training.lora."
)

_TRAIN_CONFIG: TypeAdapter[TrainConfig] = TypeAdapter(TrainConfig)


@dataclass(frozen=True)
class Step:
    """From one plan to the next."""

    plan: dict[str, Any]
    """Fields of ``TrainConfig``."""
    changes: str
    """``micro-batch 4 -> 2``."""


def planned(training: Mapping[str, Any], plan: Mapping[str, Any] | None) -> dict[str, Any]:
    """The ``training`` of a spec by ``plan``; None is the spec's own."""
    return {**training, **(plan or {})}


def plan_of(training: Mapping[str, Any]) -> dict[str, Any]:
    """What of ``training`` is a plan."""
    return _plan(_TRAIN_CONFIG.validate_python(dict(training)))


def after_out_of_memory(
    training: Mapping[str, Any], plan: Mapping[str, Any] | None, gpus: int
) -> Step | None:
    """The next cheaper plan; None when there is none."""
    train = _TRAIN_CONFIG.validate_python(planned(training, plan))
    following = _cheaper(train, gpus)
    if following is None:
        return None
    before, after = _plan(train), _plan(following)
    changed = [name for name in _FIELDS if before[name] != after[name]]
    said = [f"{_NAMES[name]} {_said(before[name])} -> {_said(after[name])}" for name in changed]
    return Step(after, ", ".join(said))


def _cheaper(train: TrainConfig, gpus: int) -> TrainConfig | None:
    """Half of what a rank holds at once, then recomputed activations, then the next stage."""
    rows = min(train.per_device_train_batch_size, math.ceil(train.train_batch_size / gpus))
    tokens = train.per_device_max_tokens
    # An example that is longer than ``per_device_max_tokens`` is held alone all the same.
    if tokens is not None and tokens > train.max_length:
        return replace(train, per_device_max_tokens=max(tokens // 2, train.max_length))
    if tokens is None and max(rows, train.per_device_eval_batch_size) > 1:
        half = max(1, rows // 2)
        evaluated = min(train.per_device_eval_batch_size, half)
        return replace(train, per_device_train_batch_size=half, per_device_eval_batch_size=evaluated)
    if not train.gradient_checkpointing:
        return replace(train, gradient_checkpointing=True)
    if train.zero_stage in (0, 1, 2) and gpus > 1:
        return replace(train, zero_stage=train.zero_stage + 1)
    return None


def _plan(train: TrainConfig) -> dict[str, Any]:
    every = asdict(train)
    return {name: every[name] for name in _FIELDS}


def _said(value: Any) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)
