"""The engine: one model, its units, and the three calls of a training step.

    engine = ZeroEngine(model, ZeroConfig(stage=3), optimizer=AdamWConfig(lr=1e-4))
    loss = engine(**batch).loss
    engine.backward(loss, target_tokens=n)
    report = engine.step()          # None before the accumulation boundary

Division has one owner. ``backward`` multiplies a micro-batch's mean loss by its target tokens, so that
what accumulates and is reduced is the gradient of the loss's sum; ``step`` divides once, by the target
tokens of the whole global batch. Ranks and micro-batches therefore never enter the result.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zero_core.comm.collectives import Communicator
from zero_core.comm.failure import FailureBoard
from zero_core.config.optimizer import AdamWConfig, OptimizerConfig
from zero_core.config.zero import ZeroConfig
from zero_core.memory.ledger import Footprint, Usage, footprint, reset_peak, resident
from zero_core.planner.formulas import Storage
from zero_core.sharding.assembly import Assembly, assemble
from zero_core.sharding.buffers import average_statistics, normalizations
from zero_core.sharding.encoding import storage_of
from zero_core.sharding.flat_parameter import FlatParameter, Weights
from zero_core.sharding.loss_scaler import LossScaler
from zero_core.sharding.norm import square_sum
from zero_core.sharding.optimizer import ShardedOptimizer
from zero_core.sharding.unit import Pass, Unit


@dataclass(frozen=True)
class StepReport:
    """What one optimizer step did. The same on every rank, traffic excepted."""

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

    loss_scale: float
    """Of this step; 1 in any precision but fp16."""

    elements_sent: int
    """Elements at the collectives of this rank since the last step (see ``collectives``)."""

    bytes_sent: int
    """What this rank really sent for them."""

    ring_factor: float
    """(N - 1)/N: the part of a shard group's elements that really travels."""


class ZeroEngine:
    """Takes over ``model`` in place; every rank passes an equal one. Its parameters stay the same objects.

    ``optimizer`` is built by the engine, over the shards. ``lr_schedule`` maps the number of steps done to
    a factor of the peak learning rate. ``weights`` fills parameters that are on the meta device, each rank
    reading its own slices. ``device`` is where the model goes; by default where its parameters are.
    """

    def __init__(
        self,
        model: nn.Module,
        config: ZeroConfig,
        optimizer: AdamWConfig | OptimizerConfig | None = None,
        lr_schedule: Callable[[int], float] | None = None,
        weights: Weights | None = None,
        device: torch.device | None = None,
    ) -> None:
        named = _named(optimizer)
        self.model = model
        self.config = config
        self.steps = 0
        self._micro_batch = 0
        self._micro_batches = config.gradient_accumulation_steps
        self._weight = 0.0
        self._unit_weight = 1.0
        parts: Assembly = assemble(model, config, weights, device)
        self.device = parts.device
        self.communicator: Communicator = parts.communicator
        self.units: list[Unit] = parts.units
        self._normalizations = normalizations(model)
        self._failures = FailureBoard(self.communicator)
        self._ledger = parts.ledger
        self._schedule = parts.schedule
        self._handles = [
            model.register_forward_pre_hook(self._before_model, prepend=True),
            model.register_forward_hook(self._after_model),
        ]
        self.scaler = LossScaler(config.loss_scale) if config.precision == "fp16" else None
        self.optimizer = ShardedOptimizer(
            self._trainable_flats(), named, lr_schedule, parts.arena, self._ledger, parts.tiers
        )
        self._tiers = parts.tiers
        self._baseline = footprint(self.device).current - self._ledger.owned()

    def _trainable_flats(self) -> list[FlatParameter]:
        return [flat for unit in self.units for flat in unit.trainable_flats]

    @property
    def trainable_elements(self) -> int:
        """Ψ, each unit's padding included."""
        return sum(flat.layout.size for flat in self._trainable_flats())

    @property
    def frozen_elements(self) -> dict[Storage, int]:
        """Elements that are not trained, padding included, by how they are kept."""
        elements: Counter[Storage] = Counter()
        for unit in self.units:
            for flat in unit.flats:
                if not flat.trainable:
                    elements[storage_of(flat.encoding, self.config.precision)] += flat.layout.size
        return dict(elements)

    @property
    def learning_rate(self) -> float:
        """Learning rate that the next step would use."""
        return self.optimizer.lr_at(self.steps)

    # A training step.

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._failures.watch():
            try:
                return self.model(*args, **kwargs)
            except BaseException:
                self._schedule.abandon()
                raise

    def accumulate(self, micro_batches: int) -> None:
        """Make the step that begins of ``micro_batches`` calls of ``backward``, on every rank alike.

        The configuration says how many there are at most, and for every step that is not told otherwise.
        """
        most = self.config.gradient_accumulation_steps
        if self._micro_batch or not 1 <= micro_batches <= most:
            raise ValueError(
                f"micro_batches: {micro_batches!r} after {self._micro_batch} of the step; call it before the "
                f"first backward of a step, with 1 to gradient_accumulation_steps ({most})"
            )
        self._micro_batches = micro_batches

    def backward(self, loss: Tensor, target_tokens: float = 1.0, retain_graph: bool = False) -> None:
        """Accumulate the gradient of ``loss``, the mean over this micro-batch's ``target_tokens``.

        Without a count every micro-batch of every rank weighs alike. Collective: a rank without data
        calls it with a zero loss and a count of 0.
        """
        if self._micro_batch == self._micro_batches:
            raise RuntimeError(f"backward was called {self._micro_batches} times in this step; call step()")
        with self._failures.watch():
            self._backward(loss, target_tokens, retain_graph)

    def _backward(self, loss: Tensor, target_tokens: float, retain_graph: bool) -> None:
        self._thaw()
        if self._micro_batch == 0:
            self._unit_weight = self._agree_on_unit_weight(target_tokens)
        self._micro_batch += 1
        self._weight += target_tokens
        last = self._micro_batch == self._micro_batches
        for unit in self.units:
            unit.start_backward()
        self._schedule.open_backward(reduce=last or self._reduces_always)
        try:
            root = self.units[0]
            if not root.name and root.calls:
                self._schedule.need(root)
            if self._reduces_always:
                # Else the most memory is not needed now but at backward's end.
                self.units[-1].make_room()
            (loss.float() * (target_tokens / self._unit_weight)).backward(retain_graph=retain_graph)
            self._schedule.close_backward()
        finally:
            self._schedule.current = Pass.IDLE
        for flat in self._trainable_flats():
            flat.gradient.settle()
        if last:
            for flat in self._trainable_flats():
                flat.gradient.sum_replicas()

    @property
    def _reduces_always(self) -> bool:
        """Also before the accumulation boundary."""
        return self.units[0].flats[0].policy.placement.gradients

    def _agree_on_unit_weight(self, target_tokens: float) -> float:
        """Target tokens that count as one in this step's gradients.

        fp16 must see gradients of the mean loss times the loss scale, not of the sum, and their sum over
        the ranks must not overflow either: a power of two, so that dividing by it loses nothing.
        """
        if self.scaler is None:
            return 1.0
        most = self.communicator.agree(torch.tensor([target_tokens], dtype=torch.float64)).item()
        whole_step = int(most * self._micro_batches)
        return 2.0 ** max(0, whole_step - 1).bit_length() / self.scaler.scale

    def step(self) -> StepReport | None:
        """Update the weights at the accumulation boundary; None before it. Collective."""
        if self._micro_batch < self._micro_batches:
            return None
        with self._failures.watch():
            return self._step()

    def _step(self) -> StepReport:
        scale = self.scaler.scale if self.scaler else 1.0
        # What is gathered, if anything, is old after the update.
        self._schedule.settle()
        target_tokens, sum_norm, used = self._agree_on_gradient()
        # Of the gradient as it was accumulated: see ``backward``.
        divisor = target_tokens / self._unit_weight
        grad_norm = sum_norm / divisor if divisor else 0.0
        skipped = not torch.isfinite(torch.tensor(grad_norm)).item()
        lr = self.learning_rate
        if not skipped and target_tokens:
            self.optimizer.step(lr, self._clip_factor(grad_norm) / divisor, used)
            self._share_parameters()
        for flat in self._trainable_flats():
            flat.gradient.finish_step()
        rescaled = self.scaler.update(overflow=skipped) if self.scaler else False
        if skipped or rescaled:
            self.forget_quantization_error()
        average_statistics(self._normalizations, self.communicator)
        self.steps += 1
        self._micro_batch = 0
        self._micro_batches = self.config.gradient_accumulation_steps
        self._weight = 0.0
        traffic = self.communicator.traffic
        self.communicator.restart_count()
        return StepReport(
            step=self.steps,
            grad_norm=grad_norm,
            skipped=skipped,
            lr=lr,
            target_tokens=target_tokens,
            loss_scale=scale,
            elements_sent=traffic.elements,
            bytes_sent=traffic.bytes_sent,
            ring_factor=self.communicator.ring_factor,
        )

    def refresh_parameters(self) -> None:
        """Let forward see what was restored into the optimizer. Collective."""
        self._schedule.settle()
        for flat in self._trainable_flats():
            flat.forget_secondary()
        self._share_parameters()

    def _share_parameters(self) -> None:
        """Let the ranks have what each has published."""
        flats = [flat for unit in self.units for flat in unit.flats]
        if flats[0].policy.placement.optimizer:
            # Gathers read the shards without asking whether they are there (see ``settle_places``).
            self.communicator.barrier()
        for handle in [handle for flat in flats if (handle := flat.refresh()) is not None]:
            handle.wait()

    def forget_quantization_error(self) -> None:
        """Start the error feedback of quantized gradients anew."""
        for flat in self._trainable_flats():
            flat.gradient.forget_error()

    def _clip_factor(self, grad_norm: float) -> float:
        """What ``clip_grad_norm_`` multiplies by."""
        limit = self.config.gradient_clipping
        return 1.0 if limit is None else min(1.0, limit / (grad_norm + 1e-6))

    def _agree_on_gradient(self) -> tuple[float, float, dict[FlatParameter, list[bool]]]:
        """Target tokens of the global batch, norm of the summed gradient, and which parameters any rank used.

        Each rank adds the squares of its own shard, at every stage, so all see one and the same norm; of
        replicas the first alone counts.
        """
        flats = self._trainable_flats()
        counts = self.communicator.mesh.replica == 0
        squares = square_sum([n for flat in flats for n in flat.gradient.chunk_norms()]) if counts else 0.0
        used = [used for flat in flats for used in flat.gradient.used]
        agreed = self.communicator.agree(torch.tensor([self._weight, squares, *used], dtype=torch.float64))
        anywhere = agreed[2:].bool().split([len(flat.parameters) for flat in flats])
        by_flat = {flat: flags.tolist() for flat, flags in zip(flats, anywhere, strict=True)}
        return agreed[0].item(), agreed[1].sqrt().item(), by_flat

    def _thaw(self) -> None:
        """Train what was frozen and no longer is; on all ranks alike, at any step."""
        thawed = [
            flat
            for unit in self.units
            for flat in unit.flats
            if not flat.trainable and any(parameter.requires_grad for parameter in flat.parameters)
        ]
        for flat in thawed:
            flat.thaw()
        if thawed:
            self.optimizer.add(thawed)
            self._schedule.adopt(self.units)

    # Hooks of the model.

    def _before_model(self, model: nn.Module, args: Any) -> None:
        if self._schedule.current in (Pass.IDLE, Pass.FORWARD):
            self._schedule.open_forward()

    def _after_model(self, model: nn.Module, args: Any, output: Any) -> None:
        if self._schedule.current is Pass.FORWARD:
            self._schedule.close_forward()

    # Everything else that touches the model.

    @contextmanager
    def full_parameters(self) -> Iterator[nn.Module]:
        """Every parameter whole on every rank inside the block, to be read. Collective."""
        self._schedule.settle()
        self._schedule.current = Pass.HELD
        try:
            for unit in self.units:
                unit.start_gather()
            for unit in self.units:
                unit.wait()
            yield self.model
            # No rank may leave, and its memory with it, while another still reads it.
            self.communicator.barrier()
        finally:
            self._schedule.settle()

    def gathered(self) -> Iterator[Unit]:
        """The units one after the other, each whole until the next is asked for. Collective."""
        self._schedule.settle()
        for unit in self.units:
            unit.start_gather()
            unit.wait()
            yield unit
            unit.release()
        self.communicator.barrier()

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
        """Start the peaks of ``memory`` and the counts of traffic anew: what came before is no step's."""
        self._ledger.start_step()
        reset_peak(self.device)
        self.communicator.restart_count()

    def close(self) -> None:
        """Give the model back with whole parameters and no hooks, and the process groups up. Collective."""
        self._schedule.settle()
        for unit in self.units:
            unit.start_gather()
            unit.wait()
            unit.detach()
        for handle in self._handles:
            handle.remove()
        self.communicator.barrier()
        self.communicator.close()
        self._tiers.close()


def _named(optimizer: AdamWConfig | OptimizerConfig | None) -> OptimizerConfig:
    if optimizer is None:
        return AdamWConfig().named()
    if isinstance(optimizer, AdamWConfig):
        return optimizer.named()
    if isinstance(optimizer, OptimizerConfig):
        return optimizer
    raise ValueError(
        f"optimizer: a {type(optimizer).__name__} was built before the parameters were sharded and would "
        "never train them; pass AdamWConfig(...) or OptimizerConfig(name, ...), and the engine builds it"
    )
