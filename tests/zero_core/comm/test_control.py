"""Control messages: every rank sees the same rows, by shared words and over gloo; who leaves it is named."""

import random
import zlib
from collections.abc import Iterator
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.zero_core.ranks import RankPool
from zero_core.comm.control import Control, words
from zero_core.comm.groups import Group
from zero_core.comm.peer_memory import PeerMemory
from zero_core.errors import EngineError, PeerGone, PeerSilent

LONGEST = 16
ROUNDS = 60


def control(timeout_seconds: float = 30.0) -> tuple[PeerMemory, Control]:
    """Of all ranks, in the default group."""
    ranks = tuple(range(dist.get_world_size()))
    timeout = timedelta(seconds=timeout_seconds)
    memory = PeerMemory(dist.get_rank(), len(ranks), None, words(LONGEST), timeout)
    return memory, Control(Group(ranks, dist.get_rank(), dist.group.WORLD), memory, 0, LONGEST)


def row(number: int, rank: int) -> Tensor:
    """Some are longer than what can be shown."""
    generator = torch.Generator().manual_seed(number)
    length = int(torch.randint(1, 2 * LONGEST, (1,), generator=generator))
    if number % 2:
        return torch.randn(length, generator=generator, dtype=torch.float64) * (rank + 1)
    return torch.randint(-(2**62), 2**62, (length,), generator=generator) + rank


def many_rounds() -> None:
    _, messages = control()
    rank, size = dist.get_rank(), dist.get_world_size()
    hurry = random.Random(rank)
    for number in range(ROUNDS):
        if hurry.random() < 0.2:
            # Now this rank is the last and now that one; what is right does not depend on it.
            torch.arange(1e6).cumsum(0)
        seen = messages.everyones(row(number, rank))
        assert torch.equal(seen, torch.stack([row(number, peer) for peer in range(size)]))
    dist.barrier()


@pytest.mark.parametrize("world_size", [2, 3])
def test_everyone_sees_every_row_whatever_its_length(pools: dict[int, RankPool], world_size: int) -> None:
    pools[world_size].run(many_rounds)


def wait_for_rank_1(what_it_does: str) -> str:
    memory, messages = control(timeout_seconds=1.0)
    told = ""
    if dist.get_rank() == 0:
        try:
            messages.everyones(torch.zeros(4, dtype=torch.int64))
        except EngineError as error:
            told = str(error)
    elif what_it_does == "closes":
        memory.close()
    elif what_it_does == "is half done":
        # All of a row, with a checksum that is not its own.
        with mock.patch.object(zlib, "crc32", return_value=0), pytest.raises(PeerSilent):
            messages.everyones(torch.zeros(4, dtype=torch.int64))
    dist.barrier()
    return told


@pytest.mark.parametrize(
    ("what_it_does", "message"),
    [
        ("closes", "rank 1 has given up"),
        ("nothing", "timed out after 1 s: rank 1 does not go on"),
        ("is half done", "timed out after 1 s: rank 1 does not go on"),
    ],
)
def test_a_peer_that_says_nothing_is_named(
    pools: dict[int, RankPool], what_it_does: str, message: str
) -> None:
    assert pools[2].run(wait_for_rank_1, what_it_does)[0] == message


def elsewhere() -> str:
    _, messages = control()
    rank = dist.get_rank()
    try:
        messages.everyones(torch.zeros(4 + rank, dtype=torch.int64))
    except RuntimeError as error:
        return str(error)
    finally:
        dist.barrier()
    raise AssertionError("nothing failed")


def test_ranks_at_different_points_are_told_so(pools: dict[int, RankPool]) -> None:
    first, second = pools[2].run(elsewhere)
    assert first.startswith("rank 1 is at another point of the program than rank 0: its message has 5 words")
    assert second.startswith("rank 0 is at another point of the program than rank 1: its message has 4 words")


def last_words() -> None:
    """Rank 1 has left; rank 0 waits for what it said, and for what it never said."""
    memory, _ = control()
    if dist.get_rank() == 1:
        memory.close()
    dist.barrier()
    if dist.get_rank() == 0:
        looks: Iterator[bool] = iter([False, True])
        memory.wait(1, lambda: next(looks))
        with pytest.raises(PeerGone, match="rank 1 has given up"):
            memory.wait(1, lambda: False)
    dist.barrier()


def test_what_a_peer_said_last_counts(pools: dict[int, RankPool]) -> None:
    pools[2].run(last_words)
