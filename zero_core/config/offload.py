"""Where parts of a rank's memory lie when they are not in use."""

from dataclasses import dataclass
from typing import Literal, get_args

from zero_core.config.checks import one_of, require

Tier = Literal["device", "host", "disk"]
"""``device``: where the model computes. ``host``: main memory. ``disk``: scratch files. On the CPU the device
is the host, and nothing is kept twice."""


@dataclass(frozen=True)
class OffloadConfig:
    """Tiers of what the engine keeps: memory and speed only, never the result, ``delayed_update`` apart."""

    optimizer: Tier = "device"
    """Master weights and optimizer state. Off the device the update runs on the host, where the reduced
    gradients then lie too (ZeRO-Offload, Ren et al. 2021)."""

    parameters: Tier = "device"
    """This rank's shards, gathered for each use: stage 3 alone (ZeRO-Infinity, Rajbhandari et al. 2021)."""

    activations: Literal["device", "host"] = "device"
    """What checkpointed blocks keep for backward; with ``gradient_checkpointing`` alone."""

    delayed_update: bool = False
    """The optimizer's update runs beside the next step's forward and backward, which see the weights of the
    step before: faster, and another trajectory."""

    def __post_init__(self) -> None:
        kept = self.optimizer == self.parameters == self.activations == "device"
        require(kept, "offload", 'the tiers are not built yet: leave them on "device"')
        one_of("offload.optimizer", self.optimizer, get_args(Tier))
        one_of("offload.parameters", self.parameters, get_args(Tier))
        one_of("offload.activations", self.activations, ("device", "host"))
        require(
            self.optimizer != "device" or not self.delayed_update,
            "offload.delayed_update",
            "needs offload.optimizer on host or disk: an update on the device leaves nothing to wait for",
        )
