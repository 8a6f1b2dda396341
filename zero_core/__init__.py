"""Shardyard's ZeRO engine.

``zero_core.config`` and ``zero_core.planner`` load no torch, so the engine's names are looked up on
first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from zero_core.config.optimizer import AdamWConfig, OptimizerConfig
from zero_core.config.train import TrainConfig
from zero_core.config.zero import LossScaleConfig, ZeroConfig

if TYPE_CHECKING:
    from zero_core.engine import StepReport, ZeroEngine

__all__ = [
    "AdamWConfig",
    "LossScaleConfig",
    "OptimizerConfig",
    "StepReport",
    "TrainConfig",
    "ZeroConfig",
    "ZeroEngine",
]


def __getattr__(name: str) -> Any:
    if name in ("StepReport", "ZeroEngine"):
        return getattr(import_module("zero_core.engine"), name)
    raise AttributeError(f"module 'zero_core' has no attribute {name!r}")
