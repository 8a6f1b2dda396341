"""Faults that users reported of other engines: each trains here as in plain PyTorch on the same batch.

The reports are named by repository and number. What is common to all: some rank does in some step what
the others don't, or a parameter is not what one expects of a parameter.
"""

from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.zero_core.hard_models import (
    OPTIMIZER,
    Case,
    Chunked,
    Experts,
    Many,
    Mixtures,
    Outcome,
    Pairs,
    Shapes,
    Tied,
    TiedByUse,
    TwoTowers,
    assert_alike,
    in_plain_pytorch,
    inputs,
    module_of,
    on_engine,
    state_of,
)
from tests.zero_core.ranks import RankPool
from zero_core import ZeroConfig, ZeroEngine

STAGES = [0, 1, 2, 3]


# What ranks do.


def one_expert(model: Any, part: int, rank: int) -> Tensor:
    """Each rank another expert in the same micro-batch."""
    return model(inputs(part, rank), (part + rank) % 3)


ROUTES = [
    # Alike at first, so that the engine has something to predict; then not; then alike again.
    ([0, 1], [0, 1], [0, 1]),
    ([0, 1], [0, 1], [0, 1]),
    ([2, 1], [3], [0]),
    ([], [2, 0, 3], [1]),
    ([3], [3], [3]),
    ([3], [0], [2, 1]),
]


def routed(model: Any, part: int, rank: int) -> Tensor:
    return model(inputs(part, rank), ROUTES[part % len(ROUTES)][rank])


def twice(model: Any, part: int, rank: int) -> Tensor:
    """One expert several times in one pass."""
    return model(inputs(part, rank), [3, 1, 3] if part % 2 == 0 else [2, 2, rank])


def alternating_images(model: Any, part: int, rank: int) -> Tensor:
    """Nobody has an image in the first two micro-batches; then one rank at a time."""
    has_image = part >= 2 and part % 3 == rank
    return model(inputs(part, rank), inputs(part + 50, rank) if has_image else None).mean()


def images_in_evaluation(model: Any, part: int, rank: int) -> Tensor:
    """Another rank has the images than in training, and each has another number of rows."""
    image = inputs(part + 70, rank, rows=2 + rank) if (part + 1) % 3 == rank else None
    return model(inputs(part + 60, rank, rows=2 + rank), image)


def chunks_inside(model: Any, part: int, rank: int) -> Tensor:
    return model(inputs(part, rank, rows=6), 1 + (part // 2 + 2 * rank) % 3)


def chunks_after(model: Any, part: int, rank: int) -> Tensor:
    hidden = model(inputs(part, rank, rows=6), 0)
    return module_of(model).loss(hidden, 1 + (part // 2 + 2 * rank) % 3)


def straight(model: Any, part: int, rank: int) -> Tensor:
    return model(inputs(part, rank)).mean()


def two_forwards(model: Any, part: int, rank: int) -> Tensor:
    """Chosen and rejected, as in preference training: backward goes through two passes."""
    chosen = model(inputs(part, rank)).square().mean()
    rejected = model(inputs(part + 50, rank, rows=2)).mean()
    return torch.nn.functional.softplus(rejected - chosen)


def own_teacher(model: Any, part: int, rank: int) -> Tensor:
    """A pass without gradients between forward and backward."""
    student = model(inputs(part, rank))
    with torch.no_grad():
        teacher = model(inputs(part + 50, rank))
    return (student - 2 * teacher).square().mean()


def freeze_in_turns(model: nn.Module, step: int) -> None:
    """Whole units, parts of a unit, units at the start and at the end; thawed, and frozen again."""
    frozen = [
        ("blocks.0", "blocks.1.first"),
        ("blocks.0", "blocks.1.first"),
        ("blocks.0.first",),
        ("blocks.1.first", "blocks.2.second"),
        ("blocks.1", "blocks.0.second"),
        (),
        ("blocks.0",),
        (),
    ][step]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))


def freeze_the_start(model: nn.Module, step: int) -> None:
    """The first forward sees two frozen units; from the third step on all train."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(step >= 2 or not name.startswith(("blocks.0", "blocks.1")))


CASES = {
    "pytorch-158719-experts-in-one-unit": Case(Mixtures, one_expert, steps=4),
    "pytorch-158719-experts-as-units": Case(Experts, routed),
    "pytorch-158719-experts-checkpointed": Case(partial(Experts, reentrant=False), routed),
    "pytorch-158719-experts-checkpointed-reentrant": Case(partial(Experts, reentrant=True), routed),
    "one-expert-twice": Case(Experts, twice),
    "one-expert-twice-checkpointed": Case(partial(Experts, reentrant=False), twice),
    "one-expert-twice-checkpointed-reentrant": Case(partial(Experts, reentrant=True), twice),
    "deepspeed-7170-mixed-text-and-images": Case(TwoTowers, alternating_images),
    "deepspeed-8262-evaluation-takes-other-branches": Case(
        TwoTowers, alternating_images, steps=5, evaluate=images_in_evaluation
    ),
    "trl-6698-chunks-inside-forward": Case(Chunked, chunks_inside),
    "trl-6698-chunks-after-forward": Case(Chunked, chunks_after),
    "pytorch-132934-0-dim": Case(partial(Shapes, [[()], [(), (3,)]], ()), straight, steps=3),
    "deepspeed-8467-empty": Case(
        partial(Shapes, [[(0,)], [(2, 0), (3,)], [(5,), (0,)]], (0,)), straight, steps=3
    ),
    "pytorch-156784-mixed-dtypes": Case(
        partial(Shapes, [[(5, 7), (9,), (3,)], [(17,), (4, 4)]], (2,), torch.bfloat16), straight, steps=3
    ),
    "pytorch-176076-uneven": Case(partial(Shapes, [[(67, 3), (1,)], [(97,)]], (35,)), straight, steps=3),
    "pytorch-176076-tied": Case(Tied, straight, steps=4),
    "tied-by-use": Case(TiedByUse, straight, steps=4),
    "smaller-than-the-ranks": Case(partial(Shapes, [[(1,)], [(1, 1), (2,)]], (1,)), straight, steps=3),
    "pytorch-186998-thawed-after-a-frozen-forward": Case(Pairs, straight, steps=5, prepare=freeze_the_start),
    "pytorch-186998-frozen-again": Case(Pairs, straight, steps=8, prepare=freeze_in_turns),
    "two-forwards-one-backward": Case(Pairs, two_forwards, steps=4),
    "a-teacher-between-forward-and-backward": Case(Pairs, own_teacher, steps=4),
}


@cache
def expected(name: str, world_size: int, accumulation: int, clipping: float | None) -> list[Outcome]:
    config = ZeroConfig(gradient_accumulation_steps=accumulation, gradient_clipping=clipping)
    return in_plain_pytorch(CASES[name], config, world_size)


def check(pools: dict[int, RankPool], name: str, world_size: int, config: ZeroConfig) -> None:
    ours = pools[world_size].run(on_engine, CASES[name], config)
    clipping = config.gradient_clipping
    assert_alike(ours, expected(name, world_size, config.gradient_accumulation_steps, clipping))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", CASES)
def test_trains_as_in_plain_pytorch(pools: dict[int, RankPool], name: str, stage: int) -> None:
    """In buckets so small that reductions start while backward runs."""
    check(pools, name, 2, ZeroConfig(stage=stage, reduce_bucket_size=100))


@pytest.mark.parametrize(
    "name",
    [
        "pytorch-158719-experts-as-units",
        "deepspeed-7170-mixed-text-and-images",
        "trl-6698-chunks-after-forward",
        "pytorch-186998-frozen-again",
        "deepspeed-8467-empty",
        "smaller-than-the-ranks",
    ],
)
def test_trains_as_in_plain_pytorch_on_three_ranks(pools: dict[int, RankPool], name: str) -> None:
    check(pools, name, 3, ZeroConfig(stage=3))


@pytest.mark.parametrize("locally", [False, True], ids=["reduced", "locally"])
@pytest.mark.parametrize(
    "name",
    [
        "one-expert-twice-checkpointed-reentrant",
        "deepspeed-7170-mixed-text-and-images",
        "pytorch-186998-frozen-again",
        "two-forwards-one-backward",
    ],
)
def test_trains_as_in_plain_pytorch_with_accumulation(
    pools: dict[int, RankPool], name: str, locally: bool
) -> None:
    config = ZeroConfig(stage=3, gradient_accumulation_steps=2, accumulate_locally=locally)
    check(pools, name, 2, config)


@pytest.mark.parametrize("stage", STAGES)
def test_pytorch_148532_clipping_is_clip_grad_norm_with_tied_weights_once(
    pools: dict[int, RankPool], stage: int
) -> None:
    limit = 0.03
    assert min(expected("pytorch-176076-tied", 2, 1, None)[0].norms) > limit
    check(pools, "pytorch-176076-tied", 2, ZeroConfig(stage=stage, gradient_clipping=limit))


@pytest.mark.parametrize("bucket", [0, 10**9])
@pytest.mark.parametrize("stage", STAGES)
def test_deepspeed_5545_buckets_in_flight_are_not_reused(
    pools: dict[int, RankPool], stage: int, bucket: int
) -> None:
    """Many small units, each alone in its bucket, and all in one."""
    config = ZeroConfig(
        stage=stage, reduce_bucket_size=bucket, allgather_bucket_size=bucket, prefetch_bucket_size=bucket
    )
    ours = pools[2].run(on_engine, MANY, config)
    assert_alike(ours, in_plain_pytorch(MANY, config, 2))


MANY = Case(Many, straight, steps=3)


def last_elements(stage: int) -> list[bool]:
    """Of each parameter: whether a step changes every element."""
    torch.manual_seed(0)
    model = Shapes([[(67, 3), (1,)], [(97,)]], (35,))
    before = [p.detach().clone() for p in model.parameters()]
    engine = ZeroEngine(model, ZeroConfig(stage=stage), OPTIMIZER)
    engine.backward(straight(engine, 0, 0))
    engine.step()
    with engine.full_parameters():
        moved = [bool((p != old).all()) for p, old in zip(model.parameters(), before, strict=True)]
    engine.close()
    return moved


@pytest.mark.parametrize("stage", STAGES)
def test_pytorch_176076_the_last_shard_is_trained(pools: dict[int, RankPool], stage: int) -> None:
    assert pools[3].run(last_elements, stage) == [[True] * 4] * 3


def two_losses(stage: int) -> dict[str, Tensor]:
    """One forward, a backward for each of its losses."""
    torch.manual_seed(0)
    config = ZeroConfig(stage=stage, gradient_accumulation_steps=2)
    engine = ZeroEngine(Pairs(), config, OPTIMIZER)
    for step in range(3):
        output = engine(inputs(step, dist.get_rank()))
        engine.backward(output.mean(), retain_graph=True)
        engine.backward(output.square().mean())
        assert engine.step() is not None
    with engine.full_parameters() as model:
        weights = state_of(model)
    engine.close()
    return weights


def summed_losses(model: Any, part: int, rank: int) -> Tensor:
    output = model(inputs(part, rank))
    return (output.mean() + output.square().mean()) / 2


@pytest.mark.parametrize("stage", STAGES)
def test_two_losses_of_one_forward_each_have_a_backward(pools: dict[int, RankPool], stage: int) -> None:
    expected = in_plain_pytorch(Case(Pairs, summed_losses, steps=3), ZeroConfig(), 2)[0].weights
    for ours in pools[2].run(two_losses, stage):
        torch.testing.assert_close(ours, expected, rtol=2e-5, atol=2e-6)


def without_data(stage: int) -> dict[str, Tensor]:
    """Rank 1 has data in the first step only, and runs no forward in the others."""
    torch.manual_seed(0)
    engine = ZeroEngine(Pairs(), ZeroConfig(stage=stage), OPTIMIZER)
    for step in range(4):
        if dist.get_rank() == 0 or step == 0:
            engine.backward(straight(engine, step, dist.get_rank()), target_tokens=3)
        else:
            engine.backward(torch.zeros((), requires_grad=True), target_tokens=0)
        engine.step()
    with engine.full_parameters() as model:
        weights = state_of(model)
    engine.close()
    return weights


def data_of_rank_0(model: Any, part: int, rank: int) -> Tensor:
    return straight(model, part, rank if part == 0 else 0)


@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_without_data_takes_part_without_a_forward(pools: dict[int, RankPool], stage: int) -> None:
    expected = in_plain_pytorch(Case(Pairs, data_of_rank_0, steps=4), ZeroConfig(), 2)[0].weights
    for ours in pools[2].run(without_data, stage):
        torch.testing.assert_close(ours, expected, rtol=2e-5, atol=2e-6)
