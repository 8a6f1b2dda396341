"""Faults of averaging, norms and loss scales that users reported of other engines.

The model's gradient is its input, so that what a step does has a closed form: with SGD at a learning rate
of 1, zeros become the negative mean of the inputs.
"""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.zero_core.hard_models import WIDTH, Dots
from tests.zero_core.ranks import RankPool
from zero_core import LossScaleConfig, OptimizerConfig, StepReport, ZeroConfig, ZeroEngine
from zero_core.config.zero import Precision

STAGES = [0, 1, 2, 3]
PATTERN = torch.tensor([1.0, -2.0, 4.0, 1.0, -1.0, 2.0])
PATTERN_NORM = (2 * 27) ** 0.5
"""Of a gradient that is PATTERN in each of the model's two blocks."""


def one_step(config: ZeroConfig, factors: list[list[float]]) -> tuple[StepReport, Tensor]:
    """One step on PATTERN times ``factors[rank][micro-batch]``; the report, and all weights."""
    engine = ZeroEngine(Dots(), config, OptimizerConfig("SGD", lr=1.0))
    report = None
    for factor in factors[dist.get_rank()]:
        engine.backward(engine(PATTERN.to(engine.units[0].flats[0].full.dtype) * factor))
        report = engine.step()
    assert report is not None
    with engine.full_parameters() as model:
        weights = torch.cat([p.detach().float() for p in model.parameters()])
    engine.close()
    return report, weights


def config_of(stage: int, precision: Precision, accumulation: int) -> ZeroConfig:
    return ZeroConfig(
        stage=stage,
        precision=precision,
        gradient_accumulation_steps=accumulation,
        loss_scale=LossScaleConfig(initial_scale_power=4),
    )


@pytest.mark.parametrize(
    ("precision", "accumulation"), [("fp32", 4), ("bf16", 1), ("bf16", 4), ("fp16", 1), ("fp16", 4)]
)
@pytest.mark.parametrize("stage", STAGES)
def test_deepspeed_7837_and_6550_mean_and_norm_are_the_same_at_every_stage(
    pools: dict[int, RankPool], stage: int, precision: Precision, accumulation: int
) -> None:
    """Odd numbers from 1 on, dealt to ranks and micro-batches: the mean is how many there are."""
    count = 2 * accumulation
    factors = [[float(2 * (2 * part + rank) + 1) for part in range(accumulation)] for rank in range(2)]
    for report, weights in pools[2].run(one_step, config_of(stage, precision, accumulation), factors):
        assert not report.skipped
        assert report.grad_norm == pytest.approx(count * PATTERN_NORM, rel=1e-6)
        assert torch.equal(weights, -count * torch.cat([PATTERN, PATTERN]))


@pytest.mark.parametrize("stage", STAGES)
def test_deepspeed_1800_accumulation_in_bf16_loses_nothing(pools: dict[int, RankPool], stage: int) -> None:
    """256 and then 31 times 1, none of which bf16 could add to 256."""
    factors = [[256.0] + [1.0] * 31] * 2
    mean = (256 + 31) / 32
    for report, weights in pools[2].run(one_step, config_of(stage, "bf16", 32), factors):
        # One rounding of the sum to the 8 bits of bf16 is the communication's.
        assert report.grad_norm == pytest.approx(mean * PATTERN_NORM, rel=2**-8)
        torch.testing.assert_close(weights, -mean * torch.cat([PATTERN, PATTERN]), rtol=2**-7, atol=0)


@pytest.mark.parametrize(
    ("stage", "locally"), [(0, False), (1, False), (2, False), (3, False), (2, True), (3, True)]
)
def test_fp16_overflows_in_no_sum_where_the_mean_does_not(
    pools: dict[int, RankPool], stage: int, locally: bool
) -> None:
    """Each gradient is at most 2^15, half of what fp16 can hold; 8 of them are far more."""
    config = ZeroConfig(
        stage=stage,
        precision="fp16",
        gradient_accumulation_steps=8,
        accumulate_locally=locally,
        loss_scale=LossScaleConfig(static=1.0),
    )
    for report, weights in pools[2].run(one_step, config, [[2.0**13] * 8] * 2):
        assert not report.skipped
        assert report.grad_norm == pytest.approx(2**13 * PATTERN_NORM, rel=1e-3)
        torch.testing.assert_close(weights, -(2**13) * torch.cat([PATTERN, PATTERN]), rtol=1e-3, atol=0)


def scaled_steps(stage: int, overflowing: list[bool]) -> tuple[list[StepReport], list[Tensor]]:
    """Rank 1 alone overflows in the steps that ``overflowing`` says."""
    config = ZeroConfig(
        stage=stage,
        precision="fp16",
        loss_scale=LossScaleConfig(initial_scale_power=8, window=3, hysteresis=2),
    )
    engine = ZeroEngine(Dots(), config, OptimizerConfig("SGD", lr=1.0))
    reports, weights = [], []
    for overflows in overflowing:
        factor = 2.0**13 if overflows and dist.get_rank() == 1 else 1.0
        engine.backward(engine(PATTERN.half() * factor))
        report = engine.step()
        assert report is not None
        reports.append(report)
        with engine.full_parameters() as model:
            weights.append(torch.cat([p.detach().float() for p in model.parameters()]))
    engine.close()
    return reports, weights


OVERFLOWING = [True, False, True, True, False, False, False, True, False, True, False, False, False, False]
SCALES = [256, 256, 256, 128, 64, 64, 64, 128, 128, 128, 64, 64, 64, 128]
"""The first overflow is forgiven, the next are not; doubling after three good steps forgives one again."""


@pytest.mark.parametrize("stage", STAGES)
def test_an_overflow_on_one_rank_skips_on_all_and_the_scale_follows_deepspeeds_rules(
    pools: dict[int, RankPool], stage: int
) -> None:
    taken = 0
    expected = []
    for overflows in OVERFLOWING:
        taken += not overflows
        expected.append(-float(taken) * torch.cat([PATTERN, PATTERN]))
    for reports, weights in pools[2].run(scaled_steps, stage, OVERFLOWING):
        assert [report.skipped for report in reports] == OVERFLOWING
        assert [report.loss_scale for report in reports] == SCALES
        for report in reports:
            if not report.skipped:
                assert report.grad_norm == pytest.approx(PATTERN_NORM, rel=1e-6)
        assert torch.equal(torch.stack(weights), torch.stack(expected))


def kept_between(config: ZeroConfig) -> tuple[list[int], int, int]:
    """Bytes of gradients after each backward of a step, elements sent in it, and Ψ."""
    engine = ZeroEngine(Dots(), config, OptimizerConfig("SGD", lr=1.0))
    kept = []
    report = None
    for _ in range(config.gradient_accumulation_steps):
        engine.backward(engine(PATTERN))
        kept.append(engine.memory()["gradients"]["current"]["device"])
        report = engine.step()
    assert report is not None
    psi = engine.trainable_elements
    engine.close()
    return kept, report.elements_sent, psi


@pytest.mark.parametrize(
    ("stage", "locally", "parts", "factor"),
    [
        (2, False, 2, 3 + 1),
        (3, False, 2, 3 * 3),
        (2, True, 1, 2),
        (3, True, 1, 2 * 3 + 1),
        (1, False, 1, 2),
        (0, False, 1, 2),
    ],
)
def test_verl_7458_between_micro_batches_only_a_shard_of_the_gradient_is_kept(
    pools: dict[int, RankPool], stage: int, locally: bool, parts: int, factor: int
) -> None:
    """Or all of it, where that was asked for, and then less is sent."""
    config = ZeroConfig(stage=stage, gradient_accumulation_steps=3, accumulate_locally=locally)
    for kept, sent, psi in pools[2].run(kept_between, config):
        assert psi >= 2 * WIDTH
        assert kept == [4 * psi // parts] * 3
        assert sent == factor * psi
