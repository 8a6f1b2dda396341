"""What the heap gives back, and gradients so large that they are mapped for themselves."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from tests.zero_core.ranks import RankPool
from zero_core import AdamWConfig, ZeroConfig, ZeroEngine
from zero_core.config.zero import Precision
from zero_core.memory.heap import MAPPED, drop
from zero_core.memory.ledger import resident

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's heap")

MIB = 1 << 20

HEAP = """
import torch
from zero_core.memory.heap import keep_what_is_freed, trim
from zero_core.memory.ledger import resident

keep_what_is_freed()
tensors = [torch.ones(1 << 20, dtype=torch.uint8) for _ in range(100)]
full = resident().current
del tensors
freed = resident().current
trim(200 << 20)
kept = resident().current
trim(50 << 20)
print(full - freed, full - kept, full - resident().current)
"""
"""In a process of its own: what a heap gives back depends on all that it ever held."""


def test_what_is_freed_stays_until_that_much_is_to_go() -> None:
    ran = subprocess.run([sys.executable, "-c", HEAP], capture_output=True, text=True, check=True)
    freed, kept, trimmed = (int(word) / MIB for word in ran.stdout.split())
    assert freed < 10
    assert kept == pytest.approx(freed, abs=5)
    assert trimmed > 90


def test_dropped_pages_go_and_their_neighbours_stay() -> None:
    whole = torch.ones(64 * MIB, dtype=torch.uint8)
    before = resident().current
    begin, end = 5 * MIB + 17, 60 * MIB - 9
    drop(whole[begin:end])
    assert before - resident().current > 54 * MIB
    assert whole[:begin].all()
    assert whole[end:].all()
    drop(whole[:100])
    assert whole[:100].all(), "no whole page, so nothing to drop"


def train_large(stage: int, precision: Precision, accumulation: int) -> tuple[torch.Tensor, list[int]]:
    """Weights after two steps, and bytes of gradients after each backward; every rank has the same data."""
    torch.manual_seed(0)
    model = nn.Linear(64, 140_001, bias=False)
    config = ZeroConfig(stage=stage, precision=precision, gradient_accumulation_steps=accumulation)
    engine = ZeroEngine(model, config, AdamWConfig(lr=1e-3))
    inputs = torch.randn(
        4, 64, generator=torch.Generator().manual_seed(1), dtype=next(model.parameters()).dtype
    )
    held = []
    for step in range(2):
        for part in inputs.chunk(accumulation):
            engine.backward(engine(part * (step + 1)).float().square().mean())
            held.append(engine._ledger.current("gradients"))
        engine.step()
    assert engine._ledger.current("gradients") == 0
    with engine.full_parameters():
        weights = model.weight.detach().float().clone()
    engine.close()
    return weights[::100], held


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("stage", [2, 3])
def test_a_gradient_mapped_for_itself_becomes_the_shard_in_place(
    pools: dict[int, RankPool], stage: int, accumulation: int
) -> None:
    size = 64 * 140_001
    assert 4 * size > MAPPED
    ((expected, _),) = pools[1].run(train_large, stage, "fp32", accumulation)
    for weights, held in pools[2].run(train_large, stage, "fp32", accumulation):
        torch.testing.assert_close(weights, expected, rtol=0, atol=2e-6)
        assert held == [pytest.approx(2 * size, rel=1e-4)] * len(held)


def test_in_bf16_the_sum_is_rounded_into_it(pools: dict[int, RankPool]) -> None:
    results = [pools[2].run(train_large, stage, "bf16", 1)[0][0] for stage in (1, 2, 3)]
    for weights in results[1:]:
        torch.testing.assert_close(weights, results[0], rtol=0, atol=0)
