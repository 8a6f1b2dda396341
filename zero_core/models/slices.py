"""Which elements of which stored tensors make up a parameter, found by running the loading's own operations.

transformers stacks the stored matrices of experts, joins gate and up projections, cuts a fused matrix into
three. ``trace`` runs its operations on tensors without memory that note which elements they would hold, as
runs of stored elements in row-major order. What moves single elements (a transpose) has no such runs.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from math import prod
from typing import Any, Self

import torch
from torch import Tensor

from zero_core.checkpoints.tensor_file import Run

MAX_RUNS = 1 << 16
"""Of one parameter; what is cut up more finely is better converted whole."""


class SliceMap:
    """A flattened tensor as runs of stored tensors, one behind the other."""

    def __init__(self, runs: Iterable[Run]) -> None:
        self.runs: list[Run] = []
        for run in runs:
            last = self.runs[-1] if self.runs else None
            if last and last.key == run.key and last.start + last.length == run.start:
                self.runs[-1] = Run(last.key, last.start, last.length + run.length)
            elif run.length:
                self.runs.append(run)
        self._ends = list(accumulate(run.length for run in self.runs))

    @classmethod
    def whole(cls, key: str, numel: int) -> "SliceMap":
        return cls([Run(key, 0, numel)])

    @property
    def numel(self) -> int:
        return self._ends[-1] if self._ends else 0

    def take(self, start: int, length: int) -> list[Run]:
        """The runs of the elements [start, start + length)."""
        taken: list[Run] = []
        index = bisect_right(self._ends, start)
        while length:
            run = self.runs[index]
            inside = start - (self._ends[index] - run.length)
            part = min(length, run.length - inside)
            taken.append(Run(run.key, run.start + inside, part))
            start, length, index = start + part, length - part, index + 1
        return taken


class NotSlices(Exception):
    """An operation moves elements in a way that runs don't describe, or cuts too finely."""


def trace(
    convert: Callable[[Sequence[Tensor]], dict[str, Tensor]], sources: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[SliceMap, tuple[int, ...]]]:
    """What ``convert`` makes of the stored ``sources``, shapes by key: elements and shape by result.

    Raises NotSlices.
    """
    traced = [_Traced(shape, SliceMap.whole(key, prod(shape))) for key, shape in sources.items()]
    results = {}
    for name, result in convert(traced).items():
        assert isinstance(result, _Traced)
        results[name] = (result.elements, tuple(result.shape))
    return results


class _Traced(torch.Tensor):
    """A tensor without memory that knows where its elements are stored."""

    elements: SliceMap

    @staticmethod
    def __new__(cls, shape: tuple[int, ...], elements: SliceMap) -> Self:
        tensor: Self = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=torch.float32, device=torch.device("meta")
        )
        tensor.elements = elements
        return tensor

    def __init__(self, shape: tuple[int, ...], elements: SliceMap) -> None:
        super().__init__()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub has it as a method of an instance
        cls,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[Any, Any] | None = None,
    ) -> Any:
        name = func.overloadpacket.__name__
        if name not in _OPERATIONS:
            raise NotSlices(name)
        results = func(*(_on_meta(argument) for argument in args), **(kwargs or {}))
        return _OPERATIONS[name](results, *args, **(kwargs or {}))


def _on_meta(argument: Any) -> Any:
    if isinstance(argument, _Traced):
        return torch.empty(argument.shape, device="meta")
    if isinstance(argument, (list, tuple)):
        return type(argument)(_on_meta(item) for item in argument)
    return argument


def _same_order(result: Tensor, tensor: _Traced, *_: Any, **__: Any) -> _Traced:
    return _Traced(tuple(result.shape), tensor.elements)


def _join(result: Tensor, tensors: list[_Traced], dim: int = 0) -> _Traced:
    """``cat``, and ``stack`` as one of tensors that have the new dimension already."""
    axis = dim % result.dim()
    rows = prod(result.shape[:axis])
    if rows * sum(len(tensor.elements.runs) for tensor in tensors) > MAX_RUNS * 16:
        raise NotSlices("join")
    sizes = [tensor.numel() // rows for tensor in tensors]
    runs = [
        run
        for row in range(rows)
        for tensor, size in zip(tensors, sizes, strict=True)
        for run in tensor.elements.take(row * size, size)
    ]
    return _checked(result, runs)


def _cut(result: Tensor, tensor: _Traced, axis: int, begin: int) -> _Traced:
    """``result``'s part of ``tensor`` along ``axis``, from ``begin`` on."""
    rows = prod(tensor.shape[:axis])
    if rows > MAX_RUNS:
        raise NotSlices("cut")
    inner = prod(tensor.shape[axis + 1 :])
    row, length = tensor.shape[axis] * inner, result.numel() // rows
    return _checked(
        result, [run for r in range(rows) for run in tensor.elements.take(r * row + begin * inner, length)]
    )


def _checked(result: Tensor, runs: list[Run]) -> _Traced:
    elements = SliceMap(runs)
    if len(elements.runs) > MAX_RUNS:
        raise NotSlices("too many runs")
    return _Traced(tuple(result.shape), elements)


def _split(results: Sequence[Tensor], tensor: _Traced, _: Any, dim: int = 0) -> list[_Traced]:
    axis = dim % tensor.dim()
    begins = [0, *accumulate(part.shape[axis] for part in results)]
    return [_cut(part, tensor, axis, begin) for part, begin in zip(results, begins, strict=False)]


def _unbind(results: Sequence[Tensor], tensor: _Traced, dim: int = 0) -> list[_Traced]:
    return [_cut(part, tensor, dim % tensor.dim(), index) for index, part in enumerate(results)]


def _select(result: Tensor, tensor: _Traced, dim: int, index: int) -> _Traced:
    axis = dim % tensor.dim()
    return _cut(result, tensor, axis, index % tensor.shape[axis])


def _slice(
    result: Tensor, tensor: _Traced, dim: int = 0, start: int | None = None, end: Any = None, step: int = 1
) -> _Traced:
    if step != 1:
        raise NotSlices("slice with a step")
    axis = dim % tensor.dim()
    return _cut(result, tensor, axis, slice(start, end).indices(tensor.shape[axis])[0])


_SAME_ORDER = (
    "_to_copy",
    "view",
    "_unsafe_view",
    "reshape",
    "unsqueeze",
    "squeeze",
    "clone",
    "detach",
    "alias",
    "contiguous",
)

_OPERATIONS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(_SAME_ORDER, _same_order),
    "cat": _join,
    "stack": _join,
    "split": _split,
    "split_with_sizes": _split,
    "unbind": _unbind,
    "select": _select,
    "slice": _slice,
}
