"""Peers that read each other's memory, peers that use sockets, and both in one group: the same results."""

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import pytest
import torch.distributed as dist

from tests.zero_core.engine_runs import Result, train
from tests.zero_core.ranks import RankPool
from tests.zero_core.reference import build_model, relative_difference, trajectory
from zero_core import ZeroConfig, ZeroEngine
from zero_core.comm.peer_memory import PeerMemory
from zero_core.config.zero import Precision

Way = Literal["memory", "sockets", "mixed", "two hosts"]
HOSTS: dict[Way, list[set[int]]] = {
    "memory": [{0, 1, 2, 3}],
    "sockets": [],
    "mixed": [{0, 1}],
    "two hosts": [{0, 1}, {2, 3}],
}
"""Who reads whom."""

STEPS = 3


@contextmanager
def only(way: Way) -> Iterator[None]:
    """Engines made inside find that they can read these peers and no others."""
    probe = PeerMemory._probe

    def restricted(self: PeerMemory, world_size: int, group: dist.ProcessGroup | None) -> None:
        probe(self, world_size, group)
        self._connected = {
            pair for pair in self._connected if any(host.issuperset(pair) for host in HOSTS[way])
        }
        # Here they could still look at each other.
        theirs = self._words._theirs
        self._words._theirs = {peer: words for peer, words in theirs.items() if peer in self}

    PeerMemory._probe = restricted  # type: ignore[method-assign]
    try:
        yield
    finally:
        PeerMemory._probe = probe  # type: ignore[method-assign]


def train_by(way: Way, config: ZeroConfig) -> Result:
    with only(way):
        return train(config, False, STEPS)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world_size", [2, 3])
def test_the_way_that_bytes_take_does_not_show(
    pools: dict[int, RankPool], world_size: int, stage: int, precision: Precision
) -> None:
    config = ZeroConfig(stage=stage, precision=precision)
    ways: tuple[Way, ...] = ("memory", "sockets", "mixed") if world_size == 3 else ("memory", "sockets")
    results = [pools[world_size].run(train_by, way, config) for way in ways]
    for other in results[1:]:
        assert relative_difference(other[0].weights, results[0][0].weights) == 0
        for ours, theirs in zip(results[0], other, strict=True):
            assert ours.losses == theirs.losses
            assert [r.bytes_sent for r in ours.reports] == [r.bytes_sent for r in theirs.reports]
    if precision == "fp32":
        expected = trajectory(False, None, STEPS)
        assert relative_difference(results[0][0].weights, expected.weights) < 1e-5


@pytest.mark.parametrize("way", ["two hosts", "sockets"])
def test_a_mesh_over_hosts_is_no_different(pools: dict[int, RankPool], way: Way) -> None:
    """Rows that tell each other by shared words, in a world that can't."""
    config = ZeroConfig(stage=3, shard_size=2)
    here, there = (pools[4].run(train_by, it, config) for it in ("memory", way))
    assert relative_difference(there[0].weights, here[0].weights) == 0
    assert [result.losses for result in there] == [result.losses for result in here]


def readable() -> list[int]:
    engine = ZeroEngine(build_model(tied=False), ZeroConfig(stage=3))
    found = [rank for rank in range(dist.get_world_size()) if rank in engine.communicator._peer_memory]
    engine.close()
    return found


def test_ranks_of_this_host_can_read_each_other(pools: dict[int, RankPool]) -> None:
    assert pools[3].run(readable) == [[1, 2], [0, 2], [0, 1]]


def groups_given_up(how: str) -> tuple[list[bool], bool]:
    """Before an engine goes that nobody closed, and after."""
    engine = ZeroEngine(build_model(tied=False), ZeroConfig(stage=3))
    groups = engine.communicator._groups
    before = [group.handle is None for group in groups if group.size > 1]
    dist.barrier()
    if how == "collected":
        del engine
        gc.collect()
    else:
        atexit._run_exitfuncs()
    return before, all(group.handle is None for group in groups)


@pytest.mark.parametrize("how", ["collected", "exit"])
def test_an_engine_that_nobody_closes_gives_its_groups_up(how: str) -> None:
    """Else their threads live until the interpreter is gone, where they abort the process now and then."""
    pool = RankPool(2)
    try:
        for before, after in pool.run(groups_given_up, how):
            assert before
            assert not any(before)
            assert after
    finally:
        pool.close()


def whole_gradients_held(accumulation: int) -> tuple[int, int]:
    """Most bytes of gradients during a backward at stage 2, and after it."""
    config = ZeroConfig(stage=2, gradient_accumulation_steps=accumulation, reduce_bucket_size=1)
    result = train(config, False, STEPS)
    after = result.after_backward["gradients"]["current"]["device"]
    return result.memory["gradients"]["peak"]["device"], after


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("world_size", [2, 3])
def test_whole_gradients_go_while_backward_goes_on(
    pools: dict[int, RankPool], world_size: int, accumulation: int
) -> None:
    """A handful of flat parameters at a time, and only shards at the end."""
    elements = sum(parameter.numel() for parameter in build_model(tied=False).parameters())
    shards = 4 * elements / world_size
    for peak, after in pools[world_size].run(whole_gradients_held, accumulation):
        assert after == pytest.approx(shards, rel=0.05)
        assert peak < shards + 0.75 * 4 * elements
