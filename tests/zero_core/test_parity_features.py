"""Every stage, precision, accumulation and number of ranks on what real models have: plain PyTorch's."""

from dataclasses import dataclass
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.zero_core.features import (
    FEATURES,
    OPTIMIZER,
    STEPS,
    Feature,
    build,
    global_batch,
    plain,
    summed_loss,
)
from tests.zero_core.ranks import RankPool
from zero_core import LossScaleConfig, ZeroConfig, ZeroEngine
from zero_core.config.zero import Precision

Case = tuple[int, Precision, int]
CASES: list[Case] = list(product((0, 1, 2, 3), ("fp32", "bf16", "fp16"), (1, 2)))  # type: ignore[arg-type]
"""Stage, precision and accumulation."""

TOLERANCE = {"fp32": 5e-5, "bf16": 0.3, "fp16": 0.05}
"""Of the way that the parameters went: what summing in another order makes of 24, 8 and 11 bits."""
NORM_TOLERANCE = {"fp32": 5e-5, "bf16": 3e-2, "fp16": 5e-3}


@dataclass
class Trained:
    norms: list[float]
    values: dict[str, Tensor]
    buffers: dict[str, Tensor]
    elements: list[int]
    trainable: int


def train(feature: Feature, cases: list[Case]) -> list[Trained]:
    return [train_one(feature, *case) for case in cases]


def train_one(feature: Feature, stage: int, precision: Precision, accumulation: int) -> Trained:
    config = ZeroConfig(
        stage=stage,
        precision=precision,
        gradient_accumulation_steps=accumulation,
        loss_scale=LossScaleConfig(initial_scale_power=8),
    )
    model = build(feature)
    engine = ZeroEngine(model, config, OPTIMIZER)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    norms, elements = [], []
    for step in range(STEPS):
        report = None
        for micro_batch in range(accumulation):
            part = global_batch(step).part(micro_batch, accumulation, rank, world_size)
            loss = summed_loss(engine, part, step) / max(part.tokens, 1)
            engine.backward(loss, part.tokens)
            report = engine.step()
        assert report is not None
        assert not report.skipped
        norms.append(report.grad_norm)
        elements.append(report.elements_sent)
    psi = engine.trainable_elements
    buffers = {name: b.float() for name, b in model.named_buffers()}
    engine.close()
    values = {name: p.detach().float() for name, p in model.named_parameters()} if rank == 0 else {}
    return Trained(norms, values, buffers, elements, psi)


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_the_trajectory_is_plain_pytorchs(
    pools: dict[int, RankPool], world_size: int, feature: Feature
) -> None:
    results = pools[world_size].run(train, feature, CASES)
    for index, (stage, precision, accumulation) in enumerate(CASES):
        split = (accumulation, world_size) if feature == "batchnorm" else (1, 1)
        expected = plain(feature, precision, *split)
        ours = [result[index] for result in results]
        case = f"stage {stage}, {precision}, accumulation {accumulation}"
        for trained in ours:
            assert trained.norms == pytest.approx(expected.norms, rel=NORM_TOLERANCE[precision]), case
            for name, buffer in trained.buffers.items():
                torch.testing.assert_close(buffer, expected.values[name], rtol=2e-2, atol=2e-2)
        gap = sum(
            float((ours[0].values[name] - expected.values[name]).square().sum()) for name in ours[0].values
        )
        assert gap**0.5 < TOLERANCE[precision] * expected.moved, case
