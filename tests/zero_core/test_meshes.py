"""Hybrid sharding, secondary shards and quantized collectives: results, elements, bytes and error bounds."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.zero_core.engine_runs import Result, train
from tests.zero_core.ranks import RankPool
from tests.zero_core.reference import relative_difference, trajectory
from zero_core import OptimizerConfig, ZeroConfig, ZeroEngine
from zero_core.comm.quantization import BlockQuantizer
from zero_core.config.zero import Precision

STEPS = 6


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize(("world_size", "shard_size"), [(4, 2), (4, 1), (3, 1), (4, 4)])
def test_hybrid_sharding_follows_plain_pytorch_and_sends_what_the_mesh_says(
    pools: dict[int, RankPool], world_size: int, shard_size: int, stage: int, accumulation: int
) -> None:
    config = ZeroConfig(
        stage=stage,
        shard_size=shard_size,
        gradient_accumulation_steps=accumulation,
        gradient_clipping=0.5,
    )
    results = pools[world_size].run(train, config, False, STEPS)
    expected = trajectory(False, 0.5, STEPS)
    assert relative_difference(results[0].weights, expected.weights) < 1e-5
    inside = {1: 2, 2: accumulation + 1, 3: 3 * accumulation}[stage] if shard_size > 1 else 0
    replicas = world_size // shard_size
    between = 2 / shard_size if replicas > 1 else 0
    for result in results:
        assert result.losses == pytest.approx(expected.losses, rel=1e-5)
        for report in result.reports:
            assert report.elements_sent == (inside + between) * result.elements


@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_secondary_shard_changes_nothing_but_where_backward_gathers(
    pools: dict[int, RankPool], accumulation: int
) -> None:
    config = ZeroConfig(stage=3, secondary_shard_size=2, gradient_accumulation_steps=accumulation)
    results = pools[4].run(train, config, False, STEPS)
    assert relative_difference(results[0].weights, trajectory(False, None, STEPS).weights) < 1e-5
    plain = pools[4].run(train, ZeroConfig(stage=3, gradient_accumulation_steps=accumulation), False, STEPS)
    for with_it, without in zip(results, plain, strict=True):
        psi = with_it.elements
        assert with_it.reports[-1].elements_sent == 3 * accumulation * psi
        # A rank sends its shard to 3 of 4 ranks, of the secondary one to 1 of 2: 3/4 and 1/2 of fp32.
        gathers = 2 * accumulation
        assert without.reports[-1].bytes_sent == 4 * psi * 3 / 4 * 3 * accumulation
        expected = 4 * psi * (3 / 4 * (1 + accumulation) + 1 / 2 * (gathers - 1))
        assert with_it.reports[-1].bytes_sent == expected


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_that_are_kept_whole_are_sent_once(
    pools: dict[int, RankPool], stage: int, accumulation: int
) -> None:
    config = ZeroConfig(stage=stage, accumulate_locally=True, gradient_accumulation_steps=accumulation)
    results = pools[2].run(train, config, False, STEPS)
    assert relative_difference(results[0].weights, trajectory(False, None, STEPS).weights) < 1e-5
    for result in results:
        factor = 2 if stage == 2 else 2 * accumulation + 1
        assert all(report.elements_sent == factor * result.elements for report in result.reports)
        assert result.memory["gradients"]["peak"]["device"] >= 4 * result.elements


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_two_steps_by_nodes_give_one_steps_result(
    pools: dict[int, RankPool], stage: int, precision: Precision
) -> None:
    one_step = pools[4].run(train, ZeroConfig(stage=stage, precision=precision), False, STEPS)
    config = ZeroConfig(stage=stage, precision=precision, node_size=2)
    two_steps = pools[4].run(train, config, False, STEPS)
    if precision == "fp32":
        assert relative_difference(two_steps[0].weights, one_step[0].weights) < 1e-6
    for result in two_steps:
        assert result.losses == pytest.approx(one_step[0].losses, rel=1e-5 if precision == "fp32" else 1e-2)
        report = result.reports[-1]
        factor = 3 if stage == 3 else 2
        assert report.elements_sent == factor * result.elements
        # A rank sends 1/2 inside its node and 1/2 of 1/2 across, where one step sends 1/2 across. In bf16
        # what was summed inside goes across in fp32.
        reduction, gather = (3, 3) if precision == "fp32" else (1 + 1, 1.5)
        assert report.bytes_sent == (reduction + (factor - 1) * gather) * result.elements


# Quantized.


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    ("options", "bytes_per_element"),
    [
        # Gathers at 1 byte and reductions at 4; the other way round at 1 and 1/2; one fp32 scale a block.
        ({"quantized_weights": True}, 2 * (1 + 4 / 256) + 4),
        ({"quantized_gradients": "int8"}, 2 * 4 + (1 + 4 / 256)),
        ({"quantized_gradients": "int4"}, 2 * 4 + (1 / 2 + 4 / 256)),
    ],
)
def test_quantized_collectives_send_fewer_bytes_and_stay_near(
    pools: dict[int, RankPool], world_size: int, options: dict[str, Any], bytes_per_element: float
) -> None:
    results: list[Result] = pools[world_size].run(train, ZeroConfig(stage=3, **options), False, STEPS)
    expected = trajectory(False, None, STEPS)
    assert results[0].losses == pytest.approx(expected.losses, rel=2e-2)
    for result in results:
        report = result.reports[-1]
        assert report.elements_sent == 3 * result.elements
        sent = bytes_per_element * result.elements * (world_size - 1) / world_size
        # Small flats have a last block that is not full.
        assert sent <= report.bytes_sent < 1.02 * sent


def gathered_weights() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 48), nn.Linear(48, 32))
    exact = {name: p.detach().clone() for name, p in model.named_parameters()}
    engine = ZeroEngine(model, ZeroConfig(stage=3, quantized_weights=True))
    with engine.full_parameters():
        seen = {name: p.detach().clone() for name, p in model.named_parameters()}
    engine.close()
    return exact, seen


def test_gathered_weights_are_within_the_bound_and_the_same_on_all_ranks(pools: dict[int, RankPool]) -> None:
    answers = pools[3].run(gathered_weights)
    for exact, seen in answers:
        largest = max(float(values.abs().max()) for values in exact.values())
        for name, values in exact.items():
            # Half a step of the largest value that can share the block.
            assert float((values - seen[name]).abs().max()) <= 0.5001 * largest / 127
            assert torch.equal(seen[name], answers[0][1][name])
        assert not torch.equal(seen["0.weight"], exact["0.weight"])


@dataclass
class Drift:
    after: list[float]
    """Largest difference from exact training, after each step."""
    one_error: float
    """Largest error that one quantization can make, times the ranks."""


class Linear(nn.Module):
    """Its gradient is its input's sum, the same at every step: errors of the mean add up."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Linear(64, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x).sum()


def drift(bits: int) -> Drift:
    torch.manual_seed(0)
    model = Linear()
    start = model.block.weight.detach().clone()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    x = torch.randn(world_size, 64, generator=torch.Generator().manual_seed(5))
    config = ZeroConfig(stage=2, quantized_gradients="int4" if bits == 4 else "int8")
    engine = ZeroEngine(model, config, OptimizerConfig("SGD", lr=1.0))
    after = []
    for step in range(1, 21):
        engine.backward(engine(x[rank]), target_tokens=1)
        engine.step()
        exact = start - step * x.mean(0)
        after.append(float((model.block.weight.detach() - exact).abs().max()))
    engine.close()
    quantizer = BlockQuantizer(bits=bits)
    bound = max(float(quantizer.error_bound(row.repeat(16)).max()) for row in x)
    return Drift(after, bound)


@pytest.mark.parametrize("bits", [4, 8])
def test_error_feedback_keeps_the_error_at_one_quantizations(pools: dict[int, RankPool], bits: int) -> None:
    for found in pools[2].run(drift, bits):
        assert 0 < found.after[0] <= found.one_error
        # The residual adds to the gradient, so a block's step can double at most.
        assert max(found.after) <= 2 * found.one_error
        assert found.after[-1] < 5 * found.after[0]
