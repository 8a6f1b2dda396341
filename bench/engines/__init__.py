"""The engines that are compared, one module each, and what a module offers: ``build``.

``build(model, setup)`` takes over a model that the rank has just built, with the default process group
running, and returns the function that trains one step on this rank's tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from bench.task import Precision

ADAMW: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
"""The same for all. Without weight decay, since engines differ in what they leave undecayed."""


@dataclass(frozen=True)
class Setup:
    """What an engine is told about the run."""

    precision: Precision
    device: torch.device
    rows: int
    """Sequences in a rank's micro-batch."""

    stage: int
    """ZeRO stage, for the engines that have several."""


@dataclass(frozen=True)
class Step:
    """One training step on one rank."""

    loss: Tensor
    """Mean loss of this rank's tokens, before the update."""

    elements_sent: int | None = None
    """Elements at this rank's collectives, where the engine counts them."""


Train = Callable[[Tensor], Step]
Build = Callable[[nn.Module, Setup], Train]


@dataclass(frozen=True)
class Engine:
    module: str
    stage: int
    title: str
    trains: bool = True
    """Else its losses say nothing."""


ENGINES: dict[str, Engine] = {
    **{f"shardyard-{stage}": Engine("ours", stage, f"Shardyard, stage {stage}") for stage in range(4)},
    "ddp": Engine("ddp", 0, "torch DDP"),
    "zero-redundancy": Engine("zero_redundancy", 1, "torch ZeroRedundancyOptimizer over DDP"),
    "fsdp2": Engine("fsdp2", 3, "torch FSDP2, reshard after forward"),
    **{f"deepspeed-{stage}": Engine("deepspeed", stage, f"DeepSpeed, stage {stage}") for stage in (1, 2, 3)},
    **{
        f"deepspeed-fused-{stage}": Engine(
            "deepspeed_fused", stage, f"DeepSpeed, stage {stage}, over torch's fused AdamW"
        )
        for stage in (1, 2, 3)
    },
    "least-work": Engine(
        "least_work", 0, "no engine: the model and 1/N of the update, nothing sent", trains=False
    ),
    "plain": Engine("plain", 0, "torch alone, no engine"),
}


def load_engine(name: str) -> Build:
    """Import the engine's module and what it needs, so that none of that counts as memory of the run."""
    build: Build = import_module(f"bench.engines.{ENGINES[name].module}").build
    return build
