"""The engine: one model, its units, and the three calls of a training step.

    engine = ZeroEngine(model, ZeroConfig(stage=3), optimizer=AdamWConfig(lr=1e-4))
    loss = engine(**batch).loss
    engine.backward(loss, target_tokens=n)
    report = engine.step()          # None before the accumulation boundary

Division has one owner. ``backward`` multiplies a micro-batch's mean loss by its target tokens, so that
what accumulates and is reduced is the gradient of the loss's sum; ``step`` divides once, by the target
tokens of the whole global batch. Ranks and micro-batches therefore never enter the result.

Reductions start in one static order, the reverse of the units' order, whatever order gradients arrive in
on a rank: so two ranks can never pair the reductions of different units.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zero_core.buffers import BufferPool
from zero_core.collectives import Communicator, Handle
from zero_core.config import AdamWConfig, Precision, ZeroConfig
from zero_core.flat_parameter import FlatParameter
from zero_core.memory import Footprint, Ledger, Usage, footprint, reset_peak, resident
from zero_core.norm import square_sum
from zero_core.optimizer import ShardedOptimizer
from zero_core.partition import Part, partition
from zero_core.placement import Placement
from zero_core.unit import Pass, Unit

DTYPES: dict[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class StepReport:
    """What one optimizer step did. The same on every rank."""

    step: int
    """Optimizer steps so far, this one and skipped ones included."""

    grad_norm: float
    """Global L2 norm of the mean gradient, before clipping."""

    skipped: bool
    """The norm was not finite: no weight and no optimizer state changed."""

    lr: float
    """Learning rate of this step."""

    target_tokens: float
    """Target tokens of the global batch: what the summed loss was divided by."""

    elements_sent: int
    """Elements at the collectives of this rank since the last step (see ``collectives``)."""

    ring_factor: float
    """(N - 1)/N: the part of ``elements_sent`` that really travels."""


class ZeroEngine:
    """Takes over ``model`` in place; every rank passes an equal one. Its parameters stay the same objects.

    ``lr_schedule`` maps the number of steps done to a factor of the peak learning rate.
    """

    def __init__(
        self,
        model: nn.Module,
        config: ZeroConfig,
        optimizer: AdamWConfig | None = None,
        lr_schedule: Callable[[int], float] | None = None,
    ) -> None:
        self.model = model
        self.config = config
        self.current_pass = Pass.FORWARD
        self.steps = 0
        self._micro_batch = 0
        self._weight = 0.0
        self._ledger = Ledger()
        self.device = next(model.parameters()).device
        self._pool = BufferPool(self.device, self._ledger)
        self.communicator = Communicator(self.device, self._pool)

        parts = partition(model, config.unit_classes)
        self.communicator.check_same(_digest(parts), "names, shapes or order of parameters")
        if not any(parameter.requires_grad for part in parts for _, parameter in part.parameters):
            raise ValueError("the model has no trainable parameter: every one has requires_grad=False")
        self.units = [self._build_unit(part) for part in parts]
        for buffer in model.buffers():
            self.communicator.broadcast(buffer)
        for unit in self.units:
            unit.release()
        self._reduce_order = list(reversed(self.units))
        self._next_reduction = 0
        self._reductions: deque[list[Handle]] = deque()
        self.optimizer = ShardedOptimizer(
            self._trainable_flats(), optimizer or AdamWConfig(), lr_schedule, self._ledger
        )
        self._baseline = footprint(self.device).current - self._ledger.owned()

    def _build_unit(self, part: Part) -> Unit:
        dtype = DTYPES[self.config.precision]
        communication_dtype = DTYPES[self.config.communication_dtype or self.config.precision]
        flats = [
            FlatParameter(
                [(name, p) for name, p in part.parameters if p.requires_grad is trainable],
                dtype=dtype,
                placement=Placement.of(self.config.stage, self.communicator.world_size),
                communicator=self.communicator,
                communication_dtype=communication_dtype,
                accumulate_in_fp32=self.config.gradient_accumulation_steps > 1,
                pool=self._pool,
                ledger=self._ledger,
            )
            for trainable in (True, False)
            if any(p.requires_grad is trainable for _, p in part.parameters)
        ]
        return Unit(part.name, part.module, flats, self)

    def _trainable_flats(self) -> list[FlatParameter]:
        return [flat for unit in self.units for flat in unit.trainable_flats]

    @property
    def trainable_elements(self) -> int:
        """Ψ, each unit's padding included."""
        return sum(flat.layout.size for flat in self._trainable_flats())

    @property
    def learning_rate(self) -> float:
        """Learning rate that the next step would use."""
        return self.optimizer.lr_at(self.steps)

    # A training step.

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    def backward(self, loss: Tensor, target_tokens: float = 1.0) -> None:
        """Accumulate the gradient of ``loss``, the mean over this micro-batch's ``target_tokens``.

        Without a count every micro-batch of every rank weighs alike. Collective: a rank without data
        calls it with a zero loss and a count of 0.
        """
        if self._micro_batch == self.config.gradient_accumulation_steps:
            raise RuntimeError("backward was called once more than gradient_accumulation_steps; call step()")
        self._micro_batch += 1
        self._weight += target_tokens
        self._next_reduction = 0
        for unit in self.units:
            unit.start_backward()
        self.current_pass = Pass.BACKWARD
        try:
            (loss * target_tokens).backward()
            self._reduce_up_to(len(self._reduce_order))
            self._finish_reductions(leave=0)
        finally:
            self.current_pass = Pass.FORWARD
            for unit in self.units:
                unit.release()

    def step(self) -> StepReport | None:
        """Update the weights at the accumulation boundary; None before it. Collective."""
        if self._micro_batch < self.config.gradient_accumulation_steps:
            return None
        target_tokens, sum_norm, used = self._agree_on_gradient()
        grad_norm = sum_norm / target_tokens if target_tokens else 0.0
        skipped = not torch.isfinite(torch.tensor(grad_norm)).item()
        lr = self.learning_rate
        if not skipped and target_tokens:
            self.optimizer.step(lr, self._gradient_factor(target_tokens, grad_norm), used)
            self.refresh_parameters()
        for flat in self._trainable_flats():
            flat.finish_step()
        self.steps += 1
        self._micro_batch = 0
        self._weight = 0.0
        elements = self.communicator.elements.total
        self.communicator.restart_count()
        return StepReport(
            self.steps, grad_norm, skipped, lr, target_tokens, elements, self.communicator.ring_factor
        )

    def refresh_parameters(self) -> None:
        """Bring the master weights to where forward reads them. Collective."""
        for handle in [h for flat in self._trainable_flats() if (h := flat.refresh())]:
            handle.wait()

    def _gradient_factor(self, target_tokens: float, grad_norm: float) -> float:
        """From the summed gradient to the mean one, clipped as ``clip_grad_norm_`` does."""
        limit = self.config.gradient_clipping
        clip = 1.0 if limit is None else min(1.0, limit / (grad_norm + 1e-6))
        return clip / target_tokens

    def _agree_on_gradient(self) -> tuple[float, float, list[bool]]:
        """Target tokens of the global batch, norm of the summed gradient, and which parameters any rank used.

        Each rank adds the squares of its own shard, at every stage, so all see one and the same norm.
        """
        flats = self._trainable_flats()
        squares = torch.stack([square_sum(self._own_part(flat)) for flat in flats]).sum().item()
        used = [used for flat in flats for used in flat.used]
        agreed = self.communicator.agree(torch.tensor([self._weight, squares, *used], dtype=torch.float64))
        return agreed[0].item(), agreed[1].sqrt().item(), [bool(u) for u in agreed[2:]]

    def _own_part(self, flat: FlatParameter) -> Tensor:
        reduced = flat.reduced_grad()
        if flat.placement.optimizer:
            return reduced
        begin, end = flat.layout.shard_range(self.communicator.rank)
        return reduced[begin:end]

    # Reductions, in static order.

    def gradients_ready(self, unit: Unit) -> None:
        """A unit has all its gradients: start every reduction whose turn has come."""
        turn = self._next_reduction
        while turn < len(self._reduce_order) and self._reduce_order[turn].ready:
            turn += 1
        self._reduce_up_to(turn)

    def _reduce_up_to(self, turn: int) -> None:
        placement = Placement.of(self.config.stage, self.communicator.world_size)
        if not placement.gradients and self._micro_batch < self.config.gradient_accumulation_steps:
            return
        while self._next_reduction < turn:
            unit = self._reduce_order[self._next_reduction]
            self._next_reduction += 1
            self._reductions.append(unit.reduce())
            self._finish_reductions(leave=1)

    def _finish_reductions(self, leave: int) -> None:
        """Wait until at most ``leave`` units' reductions are under way: what bounds their buffers."""
        while len(self._reductions) > leave:
            for handle in self._reductions.popleft():
                handle.wait()

    # Everything else that touches the model.

    @contextmanager
    def full_parameters(self) -> Iterator[nn.Module]:
        """Every parameter whole on every rank inside the block; changes to one are lost. Collective."""
        self.current_pass = Pass.HELD
        try:
            for unit in self.units:
                unit.start_gather()
            for unit in self.units:
                unit.gather()
            yield self.model
        finally:
            self.current_pass = Pass.FORWARD
            for unit in self.units:
                unit.release()

    def memory(self) -> Usage:
        """Bytes by category and tier, current and peak since the last ``start_measuring``."""
        usage = self._ledger.usage()
        seen = footprint(self.device)
        owned = self._ledger.owned()
        for category, current, peak in (
            ("other", self._baseline, self._baseline),
            ("activations", seen.current - owned - self._baseline, seen.peak - owned - self._baseline),
        ):
            usage[category] = {"current": {"device": max(0, current)}, "peak": {"device": max(0, peak)}}
        return usage

    def resident(self) -> Footprint:
        """Resident size of this process, current and peak since the last ``start_measuring``."""
        return resident()

    def start_measuring(self) -> None:
        """Start the peaks of ``memory`` and the count of elements anew: what came before is no step's."""
        self._ledger.start_step()
        reset_peak(self.device)
        self.communicator.restart_count()

    def close(self) -> None:
        """Give the model back with whole parameters and no hooks, and the process groups up. Collective."""
        for unit in self.units:
            unit.gather()
            unit.detach()
        self.communicator.close()


def _digest(parts: list[Part]) -> bytes:
    text = [
        (part.name, [(name, tuple(p.shape), p.requires_grad) for name, p in part.parameters])
        for part in parts
    ]
    return hashlib.sha256(repr(text).encode()).digest()
