"""Elements that operations move are found again, by the operations themselves on real tensors."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from zero_core.checkpoints.tensor_file import Run
from zero_core.models.slices import NotSlices, SliceMap, trace

Convert = Callable[[Sequence[Tensor]], dict[str, Tensor]]


def named(parts: Sequence[Tensor]) -> dict[str, Tensor]:
    return {str(index): part.contiguous() for index, part in enumerate(parts)}


def test_runs_that_follow_each_other_are_one() -> None:
    elements = SliceMap([Run("a", 0, 3), Run("a", 3, 2), Run("b", 0, 0), Run("a", 6, 1), Run("b", 1, 4)])
    assert elements.runs == [Run("a", 0, 5), Run("a", 6, 1), Run("b", 1, 4)]
    assert elements.numel == 10
    assert elements.take(4, 3) == [Run("a", 4, 1), Run("a", 6, 1), Run("b", 1, 1)]
    assert elements.take(9, 1) == [Run("b", 4, 1)]


@pytest.mark.parametrize(
    ("convert", "shapes", "runs"),
    [
        (lambda t: {"0": torch.stack(list(t), 0)}, [(3, 4)] * 3, 3),
        (lambda t: {"0": torch.stack(list(t), 1)}, [(3, 4)] * 3, 9),
        (lambda t: {"0": torch.cat([torch.stack(t[:2]), torch.stack(t[2:])], dim=1)}, [(3, 4)] * 4, 4),
        (lambda t: named(torch.chunk(t[0], 3, 0)), [(6, 4)], 3),
        (lambda t: named(torch.chunk(t[0], 3, -1)), [(2, 6)], 6),
        (lambda t: named(torch.split(t[0], [2, 4], dim=1)), [(2, 6)], 4),
        (lambda t: named([part.squeeze(0) for part in torch.chunk(t[0], 2)]), [(2, 6)], 2),
        (lambda t: named(torch.unbind(t[0], 1)), [(2, 3)], 6),
        (lambda t: {"0": t[0][1:3]}, [(4, 6)], 1),
        (lambda t: {"0": t[0][:, -2]}, [(4, 6, 2)], 4),
        (lambda t: {"0": t[0].reshape(2, 12).bfloat16()}, [(4, 6)], 1),
    ],
)
def test_joined_and_cut_tensors_are_runs(convert: Convert, shapes: list[tuple[int, ...]], runs: int) -> None:
    numbers = torch.arange(200.0)
    real = [
        numbers[30 * i : 30 * i + torch.Size(shape).numel()].view(shape) for i, shape in enumerate(shapes)
    ]
    traced = trace(convert, {str(i): shape for i, shape in enumerate(shapes)})
    expected = convert(real)
    assert traced.keys() == expected.keys()
    for name, (elements, shape) in traced.items():
        values = [numbers[30 * int(run.key) + run.start :][: run.length] for run in elements.runs]
        assert torch.equal(torch.cat(values).view(shape), expected[name].float())
    assert sum(len(elements.runs) for elements, _ in traced.values()) == runs


@pytest.mark.parametrize(
    "convert",
    [
        lambda t: {"0": t[0].transpose(0, 1).contiguous()},
        lambda t: {"0": t[0] + 1},
        lambda t: {"0": t[0][::2]},
        lambda t: named(torch.chunk(t[0], 2, 1)),
    ],
)
def test_what_runs_do_not_describe_or_would_cut_too_finely_is_refused(convert: Convert) -> None:
    with pytest.raises(NotSlices):
        trace(convert, {"0": (1 << 17, 2)})
