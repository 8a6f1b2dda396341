"""Where states lie changes nothing of what is computed: bit for bit the run without offload."""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.zero_core import engine_runs, offload_runs
from tests.zero_core.ranks import RankPool
from zero_core import ZeroConfig
from zero_core.config.offload import OffloadConfig, Tier

STEPS = 3
DEVICE = OffloadConfig()
OPTIMIZER_TIERS = [OffloadConfig(optimizer="host"), OffloadConfig(optimizer="disk")]
OFF: list[Tier] = ["host", "disk"]
ALL_TIERS = OPTIMIZER_TIERS + [OffloadConfig(o, p) for o, p in product(OFF, OFF)]
"""With parameters: at stage 3."""


def same(with_it: Any, without: Any) -> None:
    assert with_it.losses == without.losses
    assert [r.grad_norm for r in with_it.reports] == [r.grad_norm for r in without.reports]
    for name, weight in without.weights.items():
        assert torch.equal(with_it.weights[name], weight), name


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize(
    ("precision", "accumulation", "clipping"), [("fp32", 1, None), ("bf16", 3, 0.5), ("fp16", 1, 0.5)]
)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_tier_follows_the_run_without(
    pools: dict[int, RankPool],
    world_size: int,
    precision: Any,
    accumulation: int,
    clipping: float | None,
    stage: int,
) -> None:
    tiers = ALL_TIERS if stage == 3 else OPTIMIZER_TIERS
    config = ZeroConfig(
        stage=stage,
        precision=precision,
        gradient_accumulation_steps=accumulation,
        gradient_clipping=clipping,
    )
    without, *others = pools[world_size].run(offload_runs.train, config, [DEVICE, *tiers], STEPS)[0]
    for tier, result in zip(tiers, others, strict=True):
        same(result, without)
        if world_size > 1 or tier.parameters == "device":
            assert [r.elements_sent for r in result.reports] == [r.elements_sent for r in without.reports]


@pytest.mark.parametrize(
    "mesh",
    [
        {"shard_size": 2},
        {"shard_size": 1},
        {"node_size": 2},
        {"quantized_weights": True, "quantized_gradients": "int8"},
        {"accumulate_locally": True, "gradient_accumulation_steps": 3},
        {"prefetch_bucket_size": 0, "allgather_bucket_size": 0},
    ],
    ids=str,
)
def test_every_mesh_and_plan(pools: dict[int, RankPool], mesh: dict[str, Any]) -> None:
    config = ZeroConfig(stage=3, **mesh)
    without, *others = pools[4].run(offload_runs.train, config, [DEVICE, *ALL_TIERS], STEPS)[0]
    for result in others:
        same(result, without)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("quantization", [None, "nf4"])
def test_adapters_and_their_frozen_base(
    pools: dict[int, RankPool], world_size: int, quantization: Any
) -> None:
    config = ZeroConfig(stage=3, frozen_quantization=quantization)
    without, *others = pools[world_size].run(
        offload_runs.train_adapters, config, [DEVICE, *ALL_TIERS], STEPS
    )[0]
    for result in others:
        assert [r.grad_norm for r in result.reports] == [r.grad_norm for r in without.reports]
        assert result.evaluated == without.evaluated
        for name, values in without.values.items():
            assert torch.equal(result.values[name], values), name


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("written", "read"),
    [
        (OffloadConfig("disk", "disk"), OffloadConfig("disk", "disk")),
        (OffloadConfig("disk", "disk"), DEVICE),
        (DEVICE, OffloadConfig("disk", "disk")),
        (OffloadConfig("host", "host"), OffloadConfig("disk")),
    ],
    ids=str,
)
def test_a_checkpoint_goes_to_any_tier_bit_for_bit(
    pools: dict[int, RankPool],
    tmp_path: Path,
    world_size: int,
    precision: Any,
    written: OffloadConfig,
    read: OffloadConfig,
) -> None:
    config = ZeroConfig(stage=3, precision=precision)
    undisturbed = pools[world_size].run(engine_runs.train, config, True, 6)[0]
    resumed, _ = pools[world_size].run(
        offload_runs.save_and_resume, config, written, read, tmp_path / "step-3"
    )[0]
    assert resumed.losses == undisturbed.losses[3:]
    for name, weight in undisturbed.weights.items():
        assert torch.equal(resumed.weights[name], weight), name


def test_a_damaged_scratch_file_ends_all_ranks_and_leaves_the_checkpoint(
    pools: dict[int, RankPool], tmp_path: Path
) -> None:
    config = ZeroConfig(stage=3, offload=OffloadConfig("disk", "disk"), scratch_directory=str(tmp_path / "s"))
    path = tmp_path / "step-2"
    codes = pools[2].run(offload_runs.damage_after_saving, config, path)
    assert codes == ["scratch_damaged", "peer_failed"]
    resumed, _ = pools[2].run(engine_runs.resume, config, True, path, 4)[0]
    undisturbed = pools[2].run(engine_runs.train, ZeroConfig(stage=3), True, 4)[0]
    assert resumed.losses == undisturbed.losses[2:]


@pytest.mark.parametrize("world_size", [1, 2])
def test_memory_holds_what_is_in_use_and_no_more(pools: dict[int, RankPool], world_size: int) -> None:
    """A model of twice the depth takes as much memory, and the disk all that the memory does not."""
    config = ZeroConfig(stage=3, reduce_bucket_size=2048, allgather_bucket_size=0)
    kept = replace(config, offload=OffloadConfig("disk", "disk"))
    shallow, deep = (pools[world_size].run(offload_runs.held, kept, layers)[0] for layers in (8, 16))
    assert deep.parameters == shallow.parameters
    # Step counts, 4 bytes a piece, stay in memory.
    assert deep.optimizer <= shallow.optimizer + 4 * 2 * 9 * 8
    block = 32 * 32 * 2 + 32 * 16 * 2 + 32 * 48 * 3 + 2 * 32
    more = 8 * block / world_size
    assert deep.on_disk["parameters"] - shallow.on_disk["parameters"] == pytest.approx(4 * more, rel=0.02)
    assert deep.on_disk["optimizer"] - shallow.on_disk["optimizer"] == pytest.approx(8 * more, rel=0.02)
