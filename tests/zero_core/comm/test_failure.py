"""A failure on one rank reaches the others in seconds, by name."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.zero_core.features import OPTIMIZER, build, global_batch, summed_loss
from tests.zero_core.ranks import RankError, RankPool
from zero_core import ZeroConfig, ZeroEngine
from zero_core.errors import PeerFailed

TIMEOUT_SECONDS = 50.0


class Boom(torch.autograd.Function):
    """Fails in backward."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        raise ValueError("the second block exploded")


def fail(stage: int, where: str) -> tuple[str, float]:
    """What this rank was told, and after how many seconds."""
    model = build("scalar")
    engine = ZeroEngine(model, ZeroConfig(stage=stage, timeout_seconds=TIMEOUT_SECONDS), OPTIMIZER)
    if dist.get_rank() == 1:
        block = model.get_submodule("blocks.1")
        if where == "forward":
            block.register_forward_hook(_explode)
        else:
            block.register_forward_hook(lambda module, args, output: Boom.apply(output))
    started = time.monotonic()
    try:
        for step in range(2):
            batch = global_batch(step).part(0, 1, dist.get_rank(), dist.get_world_size())
            engine.backward(summed_loss(engine, batch, step), 1)
            engine.step()
    except (PeerFailed, ValueError) as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - started
    raise AssertionError("nothing failed")


def _explode(*args: object) -> None:
    raise ValueError("the second block exploded")


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_rank_names_the_first_cause_long_before_the_time_out(
    pools: dict[int, RankPool], stage: int, where: str
) -> None:
    answers = pools[3].run(fail, stage, where)
    assert answers[1][0] == "ValueError: the second block exploded"
    for rank in (0, 2):
        assert answers[rank][0] == "PeerFailed: rank 1 failed first: ValueError: the second block exploded"
        assert answers[rank][1] < TIMEOUT_SECONDS / 2


def die(stage: int) -> None:
    """Rank 1 is killed in its second backward, as by a host that is short of memory."""
    model = build("scalar")
    engine = ZeroEngine(model, ZeroConfig(stage=stage, timeout_seconds=TIMEOUT_SECONDS), OPTIMIZER)
    for step in range(2):
        batch = global_batch(step).part(0, 1, dist.get_rank(), dist.get_world_size())
        loss = summed_loss(engine, batch, step)
        if (dist.get_rank(), step) == (1, 1):
            os.kill(os.getpid(), signal.SIGKILL)
        engine.backward(loss, 1)
        engine.step()


@pytest.mark.parametrize("stage", [1, 3])
def test_a_rank_that_is_killed_is_named_in_seconds(pools: dict[int, RankPool], stage: int) -> None:
    """The pool waits for a few seconds after the first rank has gone."""
    with pytest.raises(RankError) as raised:
        pools[2].run(die, stage)
    assert "memory of rank 1 can't be read" in str(raised.value)
    assert "rank 1:\nthe process ended" in str(raised.value)


_silent: list[ZeroEngine] = []
"""Kept, so that connections stay open as those of a rank that hangs."""


def wait_for_a_silent_rank(stage: int) -> tuple[str, float]:
    """Rank 1 makes the engine and never uses it."""
    engine = ZeroEngine(build("scalar"), ZeroConfig(stage=stage, timeout_seconds=2.0), OPTIMIZER)
    if dist.get_rank() == 1:
        _silent.append(engine)
        return "", 0.0
    started = time.monotonic()
    try:
        batch = global_batch(0).part(0, 1, 0, 2)
        engine.backward(summed_loss(engine.model, batch, 0), 1)
        engine.step()
    except RuntimeError as error:
        return str(error), time.monotonic() - started
    raise AssertionError("nothing failed")


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_rank_that_hangs_is_waited_for_as_long_as_configured(
    pools: dict[int, RankPool], stage: int
) -> None:
    told, seconds = pools[2].run(wait_for_a_silent_rank, stage)[0]
    assert "timed out" in told.lower()
    # The pool's own groups would wait for a minute.
    assert seconds < 30
