"""A unit: the parameters that are gathered, reduced and freed together, and the hooks that see to it.

Forward: the schedule is asked for the parameters before a module of the unit runs, and told after it.
Backward: it is asked when a gradient reaches an output of the module, and told once every trainable
parameter has its gradient, or backward has passed the module's inputs.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum, auto
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves

from zero_core.comm.collectives import Handle
from zero_core.sharding.flat_parameter import FlatParameter
from zero_core.sharding.partition import TABLES


class Pass(Enum):
    """What the engine is in the middle of."""

    IDLE = auto()
    FORWARD = auto()
    BACKWARD = auto()
    """A module that runs now is being recomputed: its parameters stay for the gradients to come."""
    HELD = auto()
    """``full_parameters``: everything stays gathered until the block ends."""


class Schedule(Protocol):
    """When gathers and reductions run; each returns once the caller may go on."""

    current: Pass

    def need(self, unit: "Unit") -> None:
        """The unit's parameters are whole when this returns."""
        ...

    def used(self, unit: "Unit") -> None:
        """A module of the unit has run forward."""
        ...

    def ready(self, unit: "Unit") -> None:
        """One of the unit's flat gradients is complete, or backward has passed the unit's inputs."""
        ...


class Unit:
    def __init__(
        self,
        index: int,
        name: str,
        modules: list[nn.Module],
        flats: list[FlatParameter],
        schedule: Schedule,
    ) -> None:
        self.index = index
        self.name = name
        self.modules = modules
        self.flats = flats
        self._schedule = schedule
        self.transient = any(flat.transient for flat in flats)
        """Some parameters are there between a gather and a release alone."""
        self._gathers: list[Handle] = []
        self.calls = 0
        """Forward calls of the unit's modules since the last ``start_forward``."""
        self._backward_calls = 0
        """Forward calls since the last backward that the next one will go through."""
        self._watched_calls = 0
        """Of these, the ones whose inputs tell when backward has passed them."""
        self._open_calls = 0
        """Of these, the ones whose inputs still wait for their gradients."""
        self._went_backward = False
        self._ran_without_graph = False
        """Reentrant checkpointing: every call has a backward of its own that brings gradients, and which is
        the last nobody can know."""
        self._hooked: set[nn.Parameter] = set()
        self.running = False
        """A module of the unit is running forward."""
        self.earlier: Unit | None = None
        """Its backward most likely follows this unit's."""
        self._handles: list[Any] = []
        for module in modules:
            self._handles.append(
                module.register_forward_pre_hook(self._before_forward, prepend=True, with_kwargs=True)
            )
            self._handles.append(module.register_forward_hook(self._after_forward))

    @property
    def trainable_flats(self) -> list[FlatParameter]:
        return [flat for flat in self.flats if flat.trainable]

    @property
    def is_table(self) -> bool:
        """Made of embeddings and linear layers outside the blocks (see ``partition``)."""
        return all(type(module) in TABLES for module in self.modules)

    @property
    def size(self) -> int:
        """Elements, padding included."""
        return sum(flat.layout.size for flat in self.flats)

    # Parameters.

    @property
    def present(self) -> bool:
        """Gathered, or being gathered."""
        return all(flat.present for flat in self.flats)

    def start_gather(self) -> None:
        """Start to gather what is not there; a second call before the wait does nothing."""
        self._gathers += [handle for flat in self.flats if (handle := flat.gather()) is not None]

    def read_ahead(self) -> None:
        """Start to read what the next gather starts from, where that is not on the device."""
        for flat in self.flats:
            flat.read_ahead()

    def take_part(self) -> None:
        """Take part in a gather that only other ranks need."""
        for handle in [h for flat in self.flats if (h := flat.take_part()) is not None]:
            handle.wait()

    def wait(self) -> None:
        """The parameters are whole when this returns, if a gather was started."""
        for handle in self._gathers:
            handle.wait()
        self._gathers = []

    def release(self) -> None:
        self.wait()
        for flat in self.flats:
            flat.release()

    # Gradients.

    def make_room(self) -> None:
        """Its backward comes next."""
        for flat in self.trainable_flats:
            flat.gradient.make_room()

    def start_forward(self) -> None:
        self.calls = 0
        if self._went_backward:
            self._backward_calls = self._watched_calls = self._open_calls = 0
            self._went_backward = False

    def start_backward(self) -> None:
        """Await a gradient of each parameter that is to be trained now: some may be frozen, or thawed."""
        self._open_calls = self._watched_calls
        self._went_backward = True
        for flat in self.trainable_flats:
            if flat.gradient.direct:
                continue
            trained = [index for index, parameter in enumerate(flat.parameters) if parameter.requires_grad]
            flat.gradient.expect(None if self._ran_without_graph else len(trained))
            for index in trained:
                if flat.parameters[index] not in self._hooked:
                    self._hook(flat, index)
        self._ran_without_graph = False

    def _hook(self, flat: FlatParameter, index: int) -> None:
        parameter = flat.parameters[index]
        self._hooked.add(parameter)
        hook = self._gradient_hook(flat, index)
        self._handles.append(parameter.register_post_accumulate_grad_hook(hook))

    @property
    def trains_whole(self) -> bool:
        """No parameter is frozen: once all have gradients, backward reads none of them."""
        return all(parameter.requires_grad for flat in self.flats for parameter in flat.parameters)

    @property
    def complete(self) -> bool:
        """Every trainable parameter has its gradient of this backward."""
        return all(flat.gradient.complete for flat in self.trainable_flats)

    @property
    def passed(self) -> bool:
        """Backward needs the unit's parameters no more, as far as its inputs can tell.

        A gradient may still come, from a computation inside that hangs on no input.
        """
        return self._watched_calls == self._backward_calls and self._open_calls == 0

    # Hooks.

    def _before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._schedule.current is Pass.HELD:
            return
        self._schedule.need(self)
        self.running = True
        if self.transient and self._schedule.current is Pass.FORWARD and torch.is_grad_enabled():
            # A leaf has its gradient as soon as it can, before the rest of the unit's backward.
            inputs = [x for x in differentiable((args, kwargs)) if not x.is_leaf]
            if inputs:
                self._watched_calls += 1
                self._watch(inputs)

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        self.running = False
        if self._schedule.current is not Pass.FORWARD:
            return
        if self.transient and torch.is_grad_enabled():
            outputs = differentiable(output)
            self._backward_calls += bool(outputs)
            for tensor in outputs:
                tensor.register_hook(self._before_backward)
        if not torch.is_grad_enabled():
            self._ran_without_graph = True
        self.calls += 1
        self._schedule.used(self)

    def _before_backward(self, grad: Tensor) -> None:
        if self._schedule.current is not Pass.BACKWARD:
            raise RuntimeError(
                "backward needs parameters that are not there (stage 3, or frozen ones that are kept "
                "encoded): call engine.backward(loss)"
            )
        self._schedule.need(self)

    def _watch(self, inputs: list[Tensor]) -> None:
        """Learn when all of them have their gradients, in the first backward that goes there."""

        def all_have_gradients(grads: Sequence[Tensor | None]) -> None:
            # The hook and the graph hold each other. Left to the cycle collector, what it finds so late lies
            # all over the heap: that grew by 10 MiB a step.
            hook.remove()
            self._open_calls -= 1
            if self._open_calls == 0:
                self._schedule.ready(self)

        hook = register_multi_grad_hook(inputs, all_have_gradients, mode="all")

    def _gradient_hook(self, flat: FlatParameter, index: int) -> Callable[[Tensor], None]:
        def on_gradient(parameter: Tensor) -> None:
            flat.gradient.accumulate(index)
            if flat.gradient.complete:
                self._schedule.ready(self)
                if self.earlier is not None and self.complete:
                    self.earlier.make_room()

        return on_gradient

    def detach(self) -> None:
        """Remove every hook."""
        for handle in self._handles:
            handle.remove()


def differentiable(structure: Any) -> list[Tensor]:
    """The tensors in nested containers, dataclasses included, that gradients flow to."""
    found: list[Tensor] = []
    for leaf in tree_leaves(structure):
        if isinstance(leaf, Tensor):
            if leaf.requires_grad:
                found.append(leaf)
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            found += differentiable([getattr(leaf, field.name) for field in fields(leaf)])
    return found
