"""Who holds how many bytes. Exact for what the engine allocates; the rest is measured from outside.

``Ledger`` is told of every buffer that the engine takes and gives back. What the process holds beyond
that comes from the allocator on CUDA and from the resident size on CPU:

- ``idle``: kept for the next buffer that is taken, and chunks' rounding;
- ``activations``: the step's peak less everything else, so they include the libraries' work space;
- ``other``: what was there before the engine, the interpreter and its libraries above all.
"""

import os
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil
import torch

from zero_core.config.offload import Tier

Category = Literal["parameters", "gradients", "optimizer", "communication", "idle", "activations", "other"]
Usage = dict[str, dict[str, dict[str, int]]]
"""``{category: {"current" | "peak": {tier: bytes}}}``"""

OWNED: tuple[Category, ...] = ("parameters", "gradients", "optimizer", "communication", "idle")


class Ledger:
    """Bytes of the engine's own buffers by category and tier, now and at most since ``start_step``."""

    def __init__(self) -> None:
        self._current: dict[tuple[Category, Tier], int] = defaultdict(int)
        self._peak: dict[tuple[Category, Tier], int] = defaultdict(int)

    def take(self, category: Category, nbytes: int, tier: Tier = "device") -> None:
        key = (category, tier)
        self._current[key] += nbytes
        self._peak[key] = max(self._peak[key], self._current[key])

    def give(self, category: Category, nbytes: int, tier: Tier = "device") -> None:
        self._current[category, tier] -= nbytes
        assert self._current[category, tier] >= 0, f"{category} on {tier} gave back more than it took"

    def start_step(self) -> None:
        self._peak = defaultdict(int, self._current)

    def current(self, category: Category, tier: Tier = "device") -> int:
        return self._current[category, tier]

    def owned(self) -> int:
        """On the compute device."""
        return sum(nbytes for (_, tier), nbytes in self._current.items() if tier == "device")

    def usage(self) -> Usage:
        usage: Usage = {category: {"current": {"device": 0}, "peak": {"device": 0}} for category in OWNED}
        for name, amounts in (("current", self._current), ("peak", self._peak)):
            for (category, tier), nbytes in amounts.items():
                usage[category][name][tier] = nbytes
        return usage


@dataclass(frozen=True)
class Footprint:
    """What the process holds on the compute device, seen from outside, in bytes."""

    current: int
    peak: int


def footprint(device: torch.device) -> Footprint:
    """On CUDA the allocator's figures; on CPU the resident size and its high-water mark."""
    if device.type == "cuda":
        return Footprint(torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device))
    return resident()


def resident() -> Footprint:
    """Resident size of this process now, and its high-water mark since ``reset_peak``."""
    current = psutil.Process().memory_info().rss
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return Footprint(current, int(line.split()[1]) * 1024)
    return Footprint(current, current)


def reset_peak(device: torch.device) -> None:
    """Start the high-water marks anew: the kernel's (proc(5), clear_refs 5) and the allocator's."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    if os.access("/proc/self/clear_refs", os.W_OK):
        Path("/proc/self/clear_refs").write_text("5")
