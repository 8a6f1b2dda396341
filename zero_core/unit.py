"""A unit: the parameters that are gathered, reduced and freed together, and the hooks that see to it.

Forward: gather before the module runs, release after it. Backward: gather when a gradient reaches an
output of the module, reduce once every trainable parameter has its gradient, release then.
The root unit is the model itself with every parameter that no other unit holds.
"""

from enum import Enum, auto
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves

from zero_core.collectives import Handle
from zero_core.flat_parameter import FlatParameter


class Pass(Enum):
    """What the engine is in the middle of."""

    FORWARD = auto()
    BACKWARD = auto()
    """A module that runs now is being recomputed: its parameters stay for the gradients to come."""
    HELD = auto()
    """``full_parameters``: everything stays gathered until the block ends."""


class Schedule(Protocol):
    """What a unit needs to know of the engine."""

    current_pass: Pass

    def gradients_ready(self, unit: "Unit") -> None: ...


class Unit:
    def __init__(self, name: str, module: nn.Module, flats: list[FlatParameter], schedule: Schedule) -> None:
        self.name = name
        self.module = module
        self.flats = flats
        self._schedule = schedule
        self._gathers: list[Handle] = []
        self._awaited = self._count_trainable()
        self._handles = [
            module.register_forward_pre_hook(self._before_forward, prepend=True),
            module.register_forward_hook(self._after_forward),
        ]
        for flat in self.trainable_flats:
            for parameter in flat.parameters:
                hook = self._gradient_hook(flat)
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))

    @property
    def trainable_flats(self) -> list[FlatParameter]:
        return [flat for flat in self.flats if flat.trainable]

    @property
    def _all_trainable(self) -> bool:
        return all(flat.trainable for flat in self.flats)

    def _count_trainable(self) -> int:
        return sum(len(flat.parameters) for flat in self.trainable_flats)

    # Parameters.

    def start_gather(self) -> None:
        """Start to gather what is not there; a second call before the wait does nothing."""
        self._gathers += [handle for flat in self.flats if (handle := flat.gather()) is not None]

    def gather(self) -> None:
        """The unit's parameters are whole when this returns."""
        self.start_gather()
        for handle in self._gathers:
            handle.wait()
        self._gathers = []

    def release(self) -> None:
        for flat in self.flats:
            flat.release()

    # Gradients.

    def reduce(self) -> list[Handle]:
        """Start to reduce the unit's gradients, and release what backward no longer reads.

        A frozen parameter may still be needed for the gradient of the unit's input, so a unit that has
        one keeps its parameters until backward ends.
        """
        handles = [flat.reduce() for flat in self.trainable_flats]
        if self._all_trainable and self._awaited == 0:
            self.release()
        return handles

    def start_backward(self) -> None:
        self._awaited = self._count_trainable()

    @property
    def ready(self) -> bool:
        """Every trainable parameter has its gradient of this backward."""
        return self._awaited == 0

    # Hooks.

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        self.gather()

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._schedule.current_pass is not Pass.FORWARD:
            return
        differentiable = [
            leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad
        ]
        if differentiable and torch.is_grad_enabled():
            register_multi_grad_hook(differentiable, self._before_backward, mode="any")
        self.release()

    def _before_backward(self, grad: Tensor) -> None:
        self.gather()

    def _gradient_hook(self, flat: FlatParameter) -> Any:
        def on_gradient(parameter: Tensor) -> None:
            assert isinstance(parameter, nn.Parameter)
            flat.accumulate(parameter)
            self._awaited -= 1
            if self.ready:
                self._schedule.gradients_ready(self)

        return on_gradient

    def detach(self) -> None:
        """Remove every hook."""
        for handle in self._handles:
            handle.remove()
