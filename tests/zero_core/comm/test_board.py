"""Offers on boards: found by their number, kept until everyone is done with them."""

from collections.abc import Callable
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.zero_core.ranks import RankPool
from zero_core.comm.board import Board, words
from zero_core.comm.peer_memory import PeerMemory, Source
from zero_core.errors import EngineError

ROUNDS = 40


class Exchanges:
    """What one rank offers on a board of its own, and what it has read there."""

    def __init__(self, slots: int, timeout_seconds: float = 30.0) -> None:
        self.rank, world_size = dist.get_rank(), dist.get_world_size()
        timeout = timedelta(seconds=timeout_seconds)
        self.memory = PeerMemory(self.rank, world_size, None, words(slots), timeout)
        peers = [rank for rank in range(world_size) if rank != self.rank]
        self.board = Board(self.memory, peers, 0, slots)
        self.seen: list[list[float]] = []
        self.released: list[str] = []
        self._stable: list[Tensor] = []

    def offer(
        self, value: float, *, released_as: str | None = None, awaited: bool = False
    ) -> Callable[[], None]:
        offered = torch.full((5,), value)
        release = None if released_as is None else partial(self.released.append, released_as)
        if release is None and not awaited:
            self._stable.append(offered)
        return self.board.exchange(offered, self._look, offset=4, release=release, awaited=awaited)

    def _look(self, sources: list[Source]) -> None:
        self.seen.append([float(self._pull(source)) for source in sources])

    def _pull(self, source: Source) -> Tensor:
        target = torch.zeros(4)
        self.memory.pull(source.rank, source.address, target)
        assert (target == target[0]).all()
        return target[0]


def release_by_and_by() -> list[list[str]]:
    """What rank 0 had released after each event; rank 1 is fast, rank 2 slow, and rank 0 itself slowest."""
    exchanges = Exchanges(slots=8)
    finish = [
        exchanges.offer(1.0, released_as="first"),
        exchanges.offer(2.0),
        exchanges.offer(3.0, released_as="third"),
    ]
    history = []
    for rank, count in ((1, 3), (2, 2), (0, 1), (0, 2), (2, 1)):
        if exchanges.rank == rank:
            for _ in range(count):
                finish.pop(0)()
        dist.barrier()
        exchanges.board.release_read()
        history.append(list(exchanges.released))
        dist.barrier()
    exchanges.board.release_all()
    assert exchanges.released == ["first", "third"]
    return history


def test_an_offer_is_kept_until_the_slowest_has_read_and_used_it(pools: dict[int, RankPool]) -> None:
    nothing: list[str] = []
    history = pools[3].run(release_by_and_by)[0]
    assert history == [nothing, nothing, ["first"], ["first"], ["first", "third"]]


def many_rounds() -> list[list[float]]:
    """On a board of two slots, with one rank that offers as far ahead as the slots allow."""
    exchanges = Exchanges(slots=2)
    ahead = 2 if exchanges.rank == 0 else 1
    under_way: list[Callable[[], None]] = []
    for number in range(ROUNDS):
        under_way.append(exchanges.offer(100.0 * exchanges.rank + number, awaited=number % 3 == 0))
        if len(under_way) == ahead:
            under_way.pop(0)()
    for finish in under_way:
        finish()
    dist.barrier()
    return exchanges.seen


def test_offers_are_found_by_number_however_often_the_slots_are_used(pools: dict[int, RankPool]) -> None:
    for rank, seen in enumerate(pools[3].run(many_rounds)):
        peers = [peer for peer in range(3) if peer != rank]
        assert seen == [[100.0 * peer + number for peer in peers] for number in range(ROUNDS)]


def wait_for_rank_1(what_it_does: str) -> str:
    exchanges = Exchanges(slots=2, timeout_seconds=1.0)
    told = ""
    if exchanges.rank == 0:
        try:
            exchanges.offer(1.0)()
        except EngineError as error:
            told = str(error)
    elif what_it_does == "closes":
        exchanges.memory.close()
    dist.barrier()
    return told


@pytest.mark.parametrize(
    ("what_it_does", "message"),
    [("closes", "rank 1 has given up"), ("nothing", "timed out after 1 s: rank 1 does not go on")],
)
def test_a_peer_that_offers_nothing_is_named(
    pools: dict[int, RankPool], what_it_does: str, message: str
) -> None:
    assert pools[2].run(wait_for_rank_1, what_it_does)[0] == message
