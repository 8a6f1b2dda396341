"""Every stage on 1 to 4 ranks follows plain PyTorch on the same global batch."""

import pytest

from tests.zero_core.engine_runs import train
from tests.zero_core.ranks import RankPool
from tests.zero_core.reference import build_model, relative_difference, trajectory
from zero_core import ZeroConfig

STEPS = 20


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("clipping", [None, 0.5], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_the_trajectory_is_plain_pytorchs(
    pools: dict[int, RankPool],
    world_size: int,
    stage: int,
    accumulation: int,
    tied: bool,
    clipping: float | None,
) -> None:
    config = ZeroConfig(stage=stage, gradient_accumulation_steps=accumulation, gradient_clipping=clipping)
    results = pools[world_size].run(train, config, tied, STEPS)
    expected = trajectory(tied, clipping, STEPS)
    for result in results:
        assert result.losses == pytest.approx(expected.losses, rel=1e-5)
        assert [r.grad_norm for r in result.reports] == pytest.approx(expected.norms, rel=1e-4)
    assert relative_difference(results[0].weights, expected.weights) < 1e-5


def test_clipping_really_clips() -> None:
    assert max(trajectory(False, None, STEPS).norms) > 0.5
    assert trajectory(False, None, STEPS).losses != pytest.approx(
        trajectory(False, 0.5, STEPS).losses, rel=1e-5
    )


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("stage", "per_step", "per_micro_batch"), [(0, 2, 0), (1, 2, 0), (2, 1, 1), (3, 0, 3)]
)
def test_elements_sent_are_exactly_the_papers(
    pools: dict[int, RankPool],
    world_size: int,
    accumulation: int,
    stage: int,
    per_step: int,
    per_micro_batch: int,
) -> None:
    config = ZeroConfig(stage=stage, gradient_accumulation_steps=accumulation)
    factor = per_step + per_micro_batch * accumulation if world_size > 1 else 0
    for result in pools[world_size].run(train, config, False, 2):
        for report in result.reports:
            assert report.elements_sent == factor * result.elements
            assert report.ring_factor == (world_size - 1) / world_size


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_model_state_is_the_formulas_bytes(pools: dict[int, RankPool], world_size: int, stage: int) -> None:
    results = pools[world_size].run(train, ZeroConfig(stage=stage), False, 2)
    parameters = sum(parameter.numel() for parameter in build_model(tied=False).parameters())
    whole = 1 if stage >= 1 else world_size
    assert sum(result.updated for result in results) == whole * parameters
    for result in results:
        usage = result.memory | {"gradients": result.after_backward["gradients"]}
        held = {name: amounts["current"]["device"] for name, amounts in usage.items()}
        shard = result.elements / world_size
        assert held["parameters"] == 4 * (shard if stage >= 3 else result.elements)
        assert held["gradients"] == 4 * (shard if stage >= 2 else result.elements)
        # Padding has no optimizer state; each piece of a parameter has a step count of 4 bytes.
        assert held["optimizer"] == 8 * result.updated + 4 * result.pieces
        assert result.updated <= (shard if stage >= 1 else result.elements)
        # Between steps a gradient is nobody's.
        assert result.memory["gradients"]["current"]["device"] == 0
