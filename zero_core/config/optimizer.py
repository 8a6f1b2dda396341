"""Which optimizer updates the shards, and how."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from zero_core.config.checks import finite, one_of, require

ELEMENTWISE_OPTIMIZERS = (
    "ASGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
)
"""Classes of ``torch.optim`` whose update of an element reads no other element, so that shards can't tell."""


@dataclass(frozen=True)
class AdamWConfig:
    """Decoupled weight decay Adam (Loshchilov & Hutter 2019), ``torch.optim.AdamW`` with its fused kernel."""

    lr: float = 1e-5
    """Peak learning rate; the scheduler multiplies it by a factor in [0, 1]."""

    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of the first and second moment."""

    eps: float = 1e-8
    """Added to the root of the second moment."""

    weight_decay: float = 0.0
    """Applied to matrices only: norms and biases (fewer than two dimensions) are never decayed."""

    def __post_init__(self) -> None:
        finite("lr", self.lr, at_least=0)
        for beta in self.betas:
            require(0 <= beta < 1, "betas", f"{beta!r} is not in [0, 1)")
        finite("eps", self.eps, above=0)
        finite("weight_decay", self.weight_decay, at_least=0)

    def named(self) -> "OptimizerConfig":
        return OptimizerConfig("AdamW", self.lr, self.weight_decay, {"betas": self.betas, "eps": self.eps})


@dataclass(frozen=True)
class OptimizerConfig:
    """An optimizer of ``torch.optim`` by its class name; it must be one that treats each element alone."""

    name: str
    """Class name in ``torch.optim``: one of ``ELEMENTWISE_OPTIMIZERS``."""

    lr: float
    """Peak learning rate."""

    weight_decay: float = 0.0
    """Applied to matrices only: norms and biases (fewer than two dimensions) are never decayed."""

    options: Mapping[str, Any] = field(default_factory=dict)
    """Further keyword arguments of the class, ``momentum`` for example."""

    def __post_init__(self) -> None:
        one_of("optimizer name", self.name, ELEMENTWISE_OPTIMIZERS)
        finite("lr", self.lr, at_least=0)
        finite("weight_decay", self.weight_decay, at_least=0)
