"""LoRA at every stage, precision and number of ranks follows plain PyTorch with peft."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from tests.tiny_model import write_tiny_model
from tests.zero_core import lora_runs
from tests.zero_core.lora_runs import LORA, STEPS, Plan, Result, distance, plain
from tests.zero_core.ranks import RankPool
from tests.zero_core.reference import relative_difference
from zero_core.checkpoints.manifest import Manifest

EXACT = [
    Plan(0),
    Plan(1, on_meta=True),
    Plan(2, accumulation=3),
    Plan(3),
    Plan(3, on_meta=True, accumulation=3),
]
MIXED = [*(Plan(stage, "bf16") for stage in (0, 1, 2, 3)), Plan(1, "fp16"), Plan(3, "fp16")]
TOLERANCE = {"bf16": 0.3, "fp16": 0.05}
"""Of the way that the adapter went: what summing in another order makes of 8 and 11 bits."""
NORM_TOLERANCE = {"bf16": 3e-2, "fp16": 5e-3}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "model")


def assert_plain(result: Result, directory: Path, what: object) -> None:
    expected = plain(directory, "fp32")
    steps = len(result.losses)
    assert result.losses == pytest.approx(expected.losses[-steps:], rel=1e-5), what
    assert [r.grad_norm for r in result.reports] == pytest.approx(expected.norms[-steps:], rel=1e-4), what
    assert relative_difference(result.adapter, expected.adapter) < 1e-5, what


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_trajectory_is_plain_pytorchs(
    pools: dict[int, RankPool], directory: Path, world_size: int
) -> None:
    results = pools[world_size].run(lora_runs.train, directory, EXACT, LORA, STEPS)[0]
    for plan, result in zip(EXACT, results, strict=True):
        assert_plain(result, directory, plan)


def test_it_really_trains(directory: Path) -> None:
    expected = plain(directory, "fp32")
    size = sum(float(value.square().sum()) for value in expected.adapter.values()) ** 0.5
    assert expected.moved > 0.1 * size


def test_mixed_precision_is_plain_pytorchs(pools: dict[int, RankPool], directory: Path) -> None:
    results = pools[2].run(lora_runs.train, directory, MIXED, LORA, STEPS)[0]
    for plan, result in zip(MIXED, results, strict=True):
        expected = plain(directory, plan.precision)
        norms = [report.grad_norm for report in result.reports]
        assert norms == pytest.approx(expected.norms, rel=NORM_TOLERANCE[plan.precision]), plan
        gap = distance(result.adapter, expected.adapter)
        assert gap < TOLERANCE[plan.precision] * expected.moved, plan
        for master in result.adapter.values():
            # Masters are no rounded copies.
            assert not torch.equal(master, master.bfloat16().float())


def test_a_checkpoint_has_the_adapter_alone_and_goes_into_any_plan(
    pools: dict[int, RankPool], directory: Path, tmp_path: Path
) -> None:
    path = tmp_path / "step-5"
    pools[3].run(lora_runs.save_after, directory, Plan(3, on_meta=True), LORA, 5, path)
    manifest = Manifest.read(path)
    expected = plain(directory, "fp32").adapter
    assert manifest.shapes == {name: list(value.shape) for name, value in expected.items()}
    stored = set()
    for file in manifest.files:
        with safe_open(path / file, framework="pt") as tensors:
            stored |= {key.rpartition("/")[0] for key in tensors.keys()}  # noqa: SIM118
    assert stored == {*expected, "rng"}
    for world_size, plan in ((2, Plan(1)), (1, Plan(0)), (3, Plan(3, on_meta=True))):
        resumed = pools[world_size].run(lora_runs.resume, directory, plan, LORA, path, STEPS)[0]
        assert_plain(resumed, directory, plan)
