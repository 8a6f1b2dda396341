"""Whom a rank that fails blames: itself, or nobody where another rank's end is the cause."""

import errno
import os

import pytest
import torch

from zero_core.config.checks import InvalidSetting
from zero_core.errors import PeerFailed, PeerGone, PeerSilent
from zero_core.training.train import first_cause


@pytest.mark.parametrize(
    "error",
    [
        PeerFailed("rank 1 failed first: MemoryError: "),
        PeerGone("rank 1 has given up"),
        PeerGone("memory of rank 1 can't be read: No such process"),
        RuntimeError("Connection closed by peer [127.0.0.1]:1234"),
    ],
)
def test_another_ranks_end_is_its_own_to_tell(error: Exception) -> None:
    assert first_cause(error) is None


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (PeerSilent("timed out after 600 s: rank 1 does not go on"), "hung"),
        (RuntimeError("Timed out waiting 600000ms for recv operation to complete"), "hung"),
        (MemoryError("std::bad_alloc"), "oom"),
        (torch.OutOfMemoryError("CUDA out of memory"), "oom"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate"), "oom"),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "disk_full"),
        (InvalidSetting("lora.target_modules: 'q' matches nothing"), "invalid_parameter"),
        (RuntimeError("a kernel failed"), "crashed"),
    ],
)
def test_a_rank_tells_its_own(error: Exception, reason: str) -> None:
    outcome = first_cause(error)
    assert outcome is not None
    assert (outcome.status, outcome.reason) == ("failed", reason)
