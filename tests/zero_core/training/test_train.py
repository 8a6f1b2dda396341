"""Whom a rank that fails blames: itself, or nobody where another rank's end is the cause."""

import errno
import os

import pytest
import torch

from zero_core.config.checks import InvalidSetting
from zero_core.errors import PeerFailed, PeerGone, PeerSilent
from zero_core.training.out_of_memory import OutOfMemory
from zero_core.training.run import Outcome
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
        (RuntimeError("std::bad_alloc"), "oom"),
        (OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)), "oom"),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "disk_full"),
        (InvalidSetting("lora.target_modules: 'q' matches nothing"), "invalid_parameter"),
        (RuntimeError("a kernel failed"), "crashed"),
    ],
)
def test_a_rank_tells_its_own(error: Exception, reason: str) -> None:
    outcome = first_cause(error)
    assert outcome is not None
    assert (outcome.status, outcome.reason) == ("failed", reason)


def test_an_out_of_memory_says_who_and_when(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    outcome = first_cause(OutOfMemory(11, "in step 12"))
    assert outcome == Outcome("failed", "oom", "out of memory on rank 1 in step 12", step=11)
    outcome = first_cause(MemoryError())
    assert outcome == Outcome("failed", "oom", "out of memory on rank 1 before the first step")
