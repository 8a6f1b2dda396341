"""One forward and backward of a model, watched: which unit was at work when, and what was alive then.

The moments are the engine's (``sharding.unit``): a unit's forward lies between its modules' hooks, and its
backward begins when a gradient reaches its outputs and lasts until another unit's begins. What happens in
no unit is the root's. A unit that is used again, as a tied embedding is, has its moments where it was first.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from zero_core.models.live_bytes import LiveBytes
from zero_core.planner.profile import ROOT, Phase
from zero_core.sharding.partition import Part
from zero_core.sharding.unit import differentiable

Key = tuple[str, Phase]


@dataclass(frozen=True)
class Trace:
    moments: dict[Key, list[list[int]]]
    """By unit and phase, in the order of first use: of each time that it was at work, live bytes whenever
    they had grown."""

    kept: dict[str, int]
    """By unit, what its forward has left for backward."""


def trace(
    model: nn.Module,
    parts: Sequence[Part],
    inputs: Callable[[], dict[str, Any]],
    loss: Callable[[dict[str, Any]], Tensor],
) -> Trace:
    """Of one ``loss(inputs())`` and its backward. The inputs count, too. Parameters are left without a
    gradient."""
    watch = _Watch(model, parts)
    try:
        with watch.live:
            given = inputs()
            value = loss(given)
            watch.start_backward()
            value.backward()
    finally:
        watch.remove()
    return Trace(watch.moments, watch.kept)


class _Watch:
    def __init__(self, model: nn.Module, parts: Sequence[Part]) -> None:
        self.live = LiveBytes([*model.parameters(), *model.buffers()], self._grown)
        self.moments: dict[Key, list[list[int]]] = {}
        self.kept: dict[str, int] = {}
        self._phase: Phase = "forward"
        self._inside: list[str] = [ROOT]
        self._key: Key | None = None
        self._now: list[int] = []
        self._log: list[tuple[list[int], int]] = []
        """Where each growth is noted."""
        self._since = 0
        """Growths before the unit that is at work began."""
        self._counted = 0
        self._handles: list[Any] = []
        for part in parts:
            for module in part.modules if part.name else []:
                self._handles += [
                    module.register_forward_pre_hook(partial(self._before_forward, part.name), prepend=True),
                    module.register_forward_hook(partial(self._after_forward, part.name)),
                ]
        for parameter in model.parameters():
            if parameter.requires_grad:
                self._handles.append(parameter.register_post_accumulate_grad_hook(self._take_gradient))
        self._enter(ROOT)

    def start_backward(self) -> None:
        self._count_kept()
        self._phase = "backward"
        self._enter(ROOT)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _grown(self, nbytes: int) -> None:
        self._log.append((self._now, len(self._now)))
        self._now.append(nbytes)

    def _enter(self, unit: str) -> None:
        key = (unit, self._phase)
        if key != self._key:
            self._key, self._since = key, len(self._log)
        self._now = [self.live.current]
        self.moments.setdefault(key, []).append(self._now)

    def _count_kept(self) -> None:
        unit = self._inside[-1]
        self.kept[unit] = self.kept.get(unit, 0) + self.live.current - self._counted
        self._counted = self.live.current

    def _before_forward(self, unit: str, *_: Any) -> None:
        if self._phase == "forward":
            self._count_kept()
            self._inside.append(unit)
        # In backward, what was checkpointed is computed again.
        self._enter(unit)

    def _after_forward(self, unit: str, module: nn.Module, args: Any, output: Any) -> None:
        if self._phase == "backward":
            return
        self._count_kept()
        self._inside.pop()
        for tensor in differentiable(output):
            tensor.register_hook(partial(self._before_backward, unit))
        self._enter(self._inside[-1])

    def _before_backward(self, unit: str, gradient: Tensor) -> None:
        if self._key != (unit, "backward"):
            self._enter(unit)

    def _take_gradient(self, parameter: Tensor) -> None:
        """It is complete: what was seen of it in the moment that is now was a gradient, and no activation."""
        gradient = parameter.grad
        assert gradient is not None
        parameter.grad = None
        alive = self.live.of(gradient)
        if alive is not None:
            for noted, place in self._log[max(self._since, alive.number) :]:
                noted[place] -= alive.nbytes
