"""A model built on the meta device: each rank reads its own slices, and trains as if it had loaded it all."""

import gc
import os
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.tiny_model import write_tiny_model
from tests.zero_core.engine_runs import micro_batches, whole_weights
from tests.zero_core.ranks import RankError, RankPool
from tests.zero_core.reference import OPTIMIZER, relative_difference
from tests.zero_core.token_loss import token_loss
from zero_core import ZeroConfig, ZeroEngine
from zero_core.config.zero import Precision
from zero_core.memory.heap import trim
from zero_core.memory.ledger import reset_peak, resident
from zero_core.models.loading import load_model, open_model
from zero_core.models.model_files import stored_tensors

STEPS = 3


@dataclass
class Result:
    losses: list[float]
    weights: dict[str, Tensor]
    bytes_read: int
    elements: int


def batch(step: int) -> dict[str, Tensor]:
    ids = torch.randint(0, 250, (12, 10), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def train(directory: Path, config: ZeroConfig, on_meta: bool) -> Result:
    if on_meta:
        opened = open_model(directory, torch.float32)
        model, weights = opened.model, opened.weights
        identities = [id(parameter) for parameter in model.parameters()]
        engine = ZeroEngine(model, config, OPTIMIZER, weights=weights)
        assert identities == [id(parameter) for parameter in model.parameters()]
        read = weights.bytes_read
    else:
        model, _ = load_model(directory, torch.float32)
        engine, read = ZeroEngine(model, config, OPTIMIZER), 0
    losses = []
    for step in range(STEPS):
        (micro_batch,) = micro_batches(batch(step), 1)
        loss = token_loss(engine, micro_batch)
        engine.backward(loss.mean, loss.tokens)
        engine.step()
        losses.append(loss.mean.item())
    weights_after = whole_weights(engine)
    elements = sum(flat.layout.size for unit in engine.units for flat in unit.flats)
    engine.close()
    return Result(losses, weights_after, read, elements)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "model")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world_size", [1, 3])
def test_each_rank_reads_its_slices_and_the_result_is_the_same(
    pools: dict[int, RankPool], directory: Path, world_size: int, stage: int, precision: Precision
) -> None:
    config = ZeroConfig(stage=stage, precision=precision)
    ours = pools[world_size].run(train, directory, config, True)
    loaded = pools[world_size].run(train, directory, config, False)
    for on_meta, whole in zip(ours, loaded, strict=True):
        assert on_meta.losses == whole.losses
        share = world_size if stage == 3 else 1
        assert on_meta.bytes_read == pytest.approx(4 * on_meta.elements / share, rel=0.05)
    assert relative_difference(ours[0].weights, loaded[0].weights) == 0


def start_at_stage_3(directory: Path, precision: Precision) -> ZeroEngine:
    opened = open_model(directory, torch.float32)
    config = ZeroConfig(stage=3, precision=precision)
    return ZeroEngine(opened.model, config, OPTIMIZER, weights=opened.weights)


def growth_at_start(directory: Path, precision: Precision, small: Path) -> tuple[int, int]:
    """Bytes that this process holds at most more than before, and those of its own part."""
    # Classes and caches come with the first model, whatever its size.
    start_at_stage_3(small, precision).close()
    gc.collect()
    trim(0)
    reset_peak(torch.device("cpu"))
    before = resident().current
    engine = start_at_stage_3(directory, precision)
    peak = resident().peak
    usage = engine.memory()
    engine.close()
    return peak - before, sum(usage[kind]["current"]["device"] for kind in ("parameters", "optimizer"))


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="Linux's high-water mark")
def test_starting_takes_a_ranks_own_part_and_less_than_the_largest_tensor_beside(
    pools: dict[int, RankPool], directory: Path, tmp_path: Path
) -> None:
    large = write_tiny_model(tmp_path / "large", hidden=512, layers=6, heads=8)
    sizes = [tensor.nbytes for tensor in stored_tensors(large).values()]
    precisions: list[tuple[Precision, float]] = [("fp32", 1.0), ("bf16", 1.5)]
    for precision, states in precisions:
        for peak, own in pools[3].run(growth_at_start, large, precision, directory):
            assert own == pytest.approx(states * sum(sizes) / 3, rel=0.01)
            assert own < peak < own + max(sizes)


def without_weights(directory: Path) -> None:
    ZeroEngine(open_model(directory, torch.float32).model, ZeroConfig(stage=3), OPTIMIZER)


def test_a_model_without_values_is_refused(pools: dict[int, RankPool], directory: Path) -> None:
    with pytest.raises(RankError, match="is on the meta device and has no values: pass weights="):
        pools[1].run(without_weights, directory)
