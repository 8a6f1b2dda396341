"""Faults that users reported of other engines: each trains here as in plain PyTorch on the same batch.

The reports are named by repository and number. What is common to all: some rank does in some step what
the others don't, or a parameter is not what one expects of a parameter.
"""

from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.zero_core.models import (
    Case,
    Chunked,
    Experts,
    Many,
    Mixtures,
    Outcome,
    Pairs,
    Shapes,
    Tied,
    TwoTowers,
    assert_alike,
    in_plain_pytorch,
    inputs,
    module_of,
    on_engine,
)
from tests.zero_core.ranks import RankPool
from zero_core import ZeroConfig, ZeroEngine

STAGES = [0, 1, 2, 3]


# What ranks do.


def one_expert(model: Any, part: int, rank: int) -> Tensor:
    """Each rank another expert in the same micro-batch."""
    return model(inputs(part, rank), (part + rank) % 3)  # type: ignore[no-any-return]


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
    return model(inputs(part, rank), ROUTES[part % len(ROUTES)][rank])  # type: ignore[no-any-return]


def twice(model: Any, part: int, rank: int) -> Tensor:
    """One expert several times in one pass."""
    return model(inputs(part, rank), [0, 1, 0] if part % 2 == 0 else [2, 2, rank])  # type: ignore[no-any-return]


def alternating_images(model: Any, part: int, rank: int) -> Tensor:
    """Nobody has an image in the first two micro-batches; then one rank at a time."""
    has_image = part >= 2 and part % 3 == rank
    return model(inputs(part, rank), inputs(part + 50, rank) if has_image else None).mean()  # type: ignore[no-any-return]


def images_in_evaluation(model: Any, part: int, rank: int) -> Tensor:
    """Another rank has the images than in training, and each has another number of rows."""
    image = inputs(part + 70, rank, rows=2 + rank) if (part + 1) % 3 == rank else None
    return model(inputs(part + 60, rank, rows=2 + rank), image)  # type: ignore[no-any-return]


def chunks_inside(model: Any, part: int, rank: int) -> Tensor:
    return model(inputs(part, rank, rows=6), 1 + (part // 2 + 2 * rank) % 3)  # type: ignore[no-any-return]


def chunks_after(model: Any, part: int, rank: int) -> Tensor:
    hidden = model(inputs(part, rank, rows=6), 0)
    return module_of(model).loss(hidden, 1 + (part // 2 + 2 * rank) % 3)  # type: ignore[no-any-return]


def straight(model: Any, part: int, rank: int) -> Tensor:
    return model(inputs(part, rank)).mean()  # type: ignore[no-any-return]


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
    "pytorch-158719-experts-in-one-unit": Case(Mixtures, one_expert),
    "pytorch-158719-experts-as-units": Case(Experts, routed),
    "pytorch-158719-experts-checkpointed": Case(partial(Experts, reentrant=False), routed),
    "pytorch-158719-experts-checkpointed-reentrant": Case(partial(Experts, reentrant=True), routed),
    "one-expert-twice": Case(Experts, twice),
    "one-expert-twice-checkpointed": Case(partial(Experts, reentrant=False), twice),
    "one-expert-twice-checkpointed-reentrant": Case(partial(Experts, reentrant=True), twice),
    "deepspeed-7170-mixed-text-and-images": Case(TwoTowers, alternating_images, steps=8),
    "deepspeed-8262-evaluation-takes-other-branches": Case(
        TwoTowers, alternating_images, evaluate=images_in_evaluation
    ),
    "trl-6698-chunks-inside-forward": Case(Chunked, chunks_inside),
    "trl-6698-chunks-after-forward": Case(Chunked, chunks_after),
    "pytorch-132934-0-dim": Case(partial(Shapes, [[()], [(), (3,)]], ()), straight),
    "deepspeed-8467-empty": Case(partial(Shapes, [[(0,)], [(2, 0), (3,)], [(5,), (0,)]], (0,)), straight),
    "pytorch-156784-mixed-dtypes": Case(
        partial(Shapes, [[(5, 7), (9,), (3,)], [(17,), (4, 4)]], (2,), torch.bfloat16), straight
    ),
    "pytorch-176076-uneven": Case(partial(Shapes, [[(67, 3), (1,)], [(97,)]], (35,)), straight),
    "pytorch-176076-tied": Case(Tied, straight),
    "smaller-than-the-ranks": Case(partial(Shapes, [[(1,)], [(1, 1), (2,)]], (1,)), straight),
    "pytorch-186998-thawed-after-a-frozen-forward": Case(Pairs, straight, prepare=freeze_the_start),
    "pytorch-186998-frozen-again": Case(Pairs, straight, steps=8, prepare=freeze_in_turns),
    "two-forwards-one-backward": Case(Pairs, two_forwards),
    "a-teacher-between-forward-and-backward": Case(Pairs, own_teacher),
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


@pytest.mark.parametrize("name", CASES)
def test_trains_as_in_plain_pytorch_on_three_ranks(pools: dict[int, RankPool], name: str) -> None:
    check(pools, name, 3, ZeroConfig(stage=3))


@pytest.mark.parametrize("locally", [False, True], ids=["reduced", "locally"])
@pytest.mark.parametrize("name", CASES)
def test_trains_as_in_plain_pytorch_with_accumulation(
    pools: dict[int, RankPool], name: str, locally: bool
) -> None:
    config = ZeroConfig(stage=3, gradient_accumulation_steps=2, accumulate_locally=locally)
    check(pools, name, 2, config)
