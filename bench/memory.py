"""A rank's memory, seen from outside: resident size on CPU, the allocator's figures on CUDA."""

from pathlib import Path

import torch


def in_use(device: torch.device) -> int:
    """Bytes now."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return _status("VmRSS")


def peak(device: torch.device) -> int:
    """Bytes at most since the process began.

    ``VmHWM`` and not ``ru_maxrss``: the latter survives ``execve``, so that a rank would start with the
    peak of the process that launched it.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return _status("VmHWM")


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}: resident memory can be measured on Linux only")
