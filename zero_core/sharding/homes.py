"""On which tier a rank keeps its own when it is not in use: what offloading means, and nothing else.

ZeRO-Offload (Ren et al. 2021) keeps master weights and optimizer state on the host and updates them there;
ZeRO-Infinity (Rajbhandari et al. 2021) also parameters, and either on disk.
"""

from dataclasses import dataclass

import torch

from zero_core.config.offload import OffloadConfig, Tier
from zero_core.config.zero import Precision


@dataclass(frozen=True)
class Homes:
    shards: Tier
    """Of parameters that are sharded, or leave the device without being."""

    masters: Tier | None
    """None: they are the parameters themselves, wherever those lie."""

    state: Tier
    """The optimizer's, of every element."""

    @classmethod
    def of(cls, offload: OffloadConfig, precision: Precision, device: torch.device) -> "Homes":
        if host_is_device(device):
            shards, state = (_on_cpu(tier) for tier in (offload.parameters, offload.optimizer))
            return cls(shards, None if precision == "fp32" else state, state)
        shards, state = offload.parameters, offload.optimizer
        # An update on the host needs the weights there: those that stay on the device are copies then.
        shared = precision == "fp32" and (state == "device" or shards != "device")
        return cls(shards, None if shared else state, state)

    @property
    def parameters_leave(self) -> bool:
        return self.shards != "device"


def host_is_device(device: torch.device) -> bool:
    """The model computes in the host's memory: to keep something there is to keep it where it is."""
    return device.type == "cpu"


def _on_cpu(tier: Tier) -> Tier:
    return "device" if tier == "host" else tier
