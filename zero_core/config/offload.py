"""Where parts of a rank's memory lie when they are not in use."""

from dataclasses import dataclass
from typing import Literal, get_args

from zero_core.config.checks import one_of, require

Tier = Literal["device", "host", "disk"]
"""``device``: where the model computes. ``host``: main memory. ``disk``: scratch files. On the CPU the device
is the host, and nothing is kept twice."""


@dataclass(frozen=True)
class OffloadConfig:
    """Tiers of what the engine keeps: memory and speed only, never the result."""

    optimizer: Tier = "device"
    """Master weights and optimizer state. Off the device the update runs on the host, where the reduced
    gradients then lie too (ZeRO-Offload, Ren et al. 2021)."""

    parameters: Tier = "device"
    """This rank's shards, gathered for each use: stage 3 alone (ZeRO-Infinity, Rajbhandari et al. 2021)."""

    activations: Literal["device", "host"] = "device"
    """What checkpointed blocks keep for backward; with ``gradient_checkpointing`` alone."""

    def __post_init__(self) -> None:
        one_of("offload.optimizer", self.optimizer, get_args(Tier))
        one_of("offload.parameters", self.parameters, get_args(Tier))
        one_of("offload.activations", self.activations, ("device", "host"))
        require(
            self.parameters == "device" or self.optimizer != "device",
            "offload.optimizer",
            "takes more memory than parameters do: put it off the device first, on host or disk",
        )
        require(self.activations == "device", "offload.activations", 'is not built yet: leave it on "device"')
