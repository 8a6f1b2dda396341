"""One flat parameter: the storage behind some of a unit's parameters, and their shard.

Who owns memory when, at N ranks of a shard group (P elements, padding included):

- ``full`` (P, compute dtype): the parameters themselves are views of it. Permanent where parameters are
  whole; at stage 3 it has memory between ``gather`` and ``release`` only. Its address is the same
  throughout, so a view that autograd saved (``weight.t()``) is valid again after the next gather.
- ``shard`` (P/N, compute dtype): what a gather starts from. At stage 3 values of their own, on the tier of
  parameters, else a view of ``full``. Off the device, it is read into its place in ``full`` for a gather.
- the secondary shard (P/H, compute dtype, H ranks of a node; hpZ): filled by a gather over all ranks,
  and what the next gathers start from until the weights change.
- encoded (frozen parameters alone, see ``encoding``): ``shard`` is the packed form, in bytes, of P/N
  elements, or of all P where parameters are whole; so is the secondary shard of P/H. ``full`` has memory
  between ``gather`` and ``release`` only, wherever parameters are.
- ``master`` (fp32): what the optimizer updates, P/N elements where optimizer state is sharded, else P.
  In fp32 it is no copy but ``shard`` or ``full``, unless the update runs elsewhere than they lie.
- ``gradient``: see ``flat_gradient``.

A released parameter keeps its shape: it becomes a view of a single NaN with strides of zero, so that
``numel()`` and ``shape`` tell the truth and a read out of turn can't go unnoticed.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from zero_core.comm.collectives import Communicator, Handle
from zero_core.comm.quantization import BlockQuantizer
from zero_core.memory.arena import Arena, Buffer
from zero_core.memory.ledger import Ledger
from zero_core.memory.tiers import Tiers, Values, Waits
from zero_core.sharding.encoding import Encoding, decode, encode
from zero_core.sharding.flat_gradient import FlatGradient, GradientPolicy
from zero_core.sharding.homes import Homes
from zero_core.sharding.layout import Layout, Piece, Slot
from zero_core.sharding.placement import Placement


class Weights(Protocol):
    """Where the values of parameters on the meta device come from."""

    def read(self, name: str, start: int, length: int) -> Tensor:
        """Elements [start, start + length) of the flattened parameter, 1-D, in the stored dtype."""
        ...

    def stored_dtype(self, name: str) -> torch.dtype:
        """What ``read`` gives."""
        ...


@dataclass(frozen=True)
class ParameterPolicy:
    """How every flat parameter of an engine is kept."""

    dtype: torch.dtype
    placement: Placement
    quantizer: BlockQuantizer | None
    """Of gathers (qwZ)."""
    weights: Weights | None
    tiers: Tiers
    homes: Homes


class FlatParameter:
    def __init__(
        self,
        named_parameters: list[tuple[str, nn.Parameter]],
        *,
        encoding: Encoding | None,
        policy: ParameterPolicy,
        gradients: GradientPolicy,
        communicator: Communicator,
        arena: Arena,
        ledger: Ledger,
    ) -> None:
        self.parameters = [parameter for _, parameter in named_parameters]
        self.policy = policy
        self.encoding = encoding
        self._communicator = communicator
        self._arena = arena
        self._ledger = ledger
        shapes = [(name, tuple(parameter.shape)) for name, parameter in named_parameters]
        block_size = 1 if encoding is None else encoding.block_size
        self.layout = Layout.pack(shapes, communicator.mesh.shard_size, block_size)
        self.trainable = self.parameters[0].requires_grad
        self.shard: Values
        self.master: Values | None = None
        self._buffer: Buffer | None = None
        self._landing: Tensor | None = None
        """Where the next gather goes, once its own part is being read."""
        self._reading: Waits | None = None
        if encoding is None:
            self._adopt()
            gradients.shards.plan(self.layout.shard_size)
        else:
            # Never trained: its gradient needs no place.
            self._adopt_encoded(encoding)
        self._places: list[int] | None = None
        if policy.placement.optimizer and self.shard.resident is not None:
            self._places = communicator.settle_places(self.shard.resident)
        poison = torch.full((), math.nan, dtype=policy.dtype, device=self.full.device)
        self._poison = [poison.expand(slot.shape) for slot in self.layout.slots]
        self._views = [self.full[slot.offset : slot.end].view(slot.shape) for slot in self.layout.slots]
        self._secondary: Tensor | None = None
        self._secondary_valid = False
        self.present = True
        if self._buffer is None:
            self._point_at(self._views)
        else:
            # Views can be made of a buffer with memory only.
            self.release()
        self.gradient = FlatGradient(
            self.parameters, self.layout, self.master_range, gradients, communicator, arena, ledger
        )

    # Construction.

    def _adopt(self) -> None:
        """Rank 0's values, or those of the weight files, as ``full``, ``shard`` and ``master``.

        Each goes through fp32: a master starts from what the model was given, not from its rounding.
        """
        policy, layout = self.policy, self.layout
        device = self._communicator.device
        begin, end = layout.shard_range(self._communicator.shard_index)
        if self.parameters[0].is_meta:
            needed = (begin, end) if policy.placement.parameters else (0, layout.size)
            exact = self._read(*needed, device)
            self._leave_meta(device)
        else:
            needed = (0, layout.size)
            exact = self._collect(device)
        if policy.placement.parameters:
            exact = exact[begin - needed[0] : end - needed[0]]
            self.shard = policy.tiers.keep(exact, policy.dtype, policy.homes.shards, "parameters")
            self._buffer = self._arena.reserve(layout.size, policy.dtype, "parameters")
            self.full = self._arena.take(self._buffer)
        else:
            self.full = exact.to(policy.dtype)
            self.shard = policy.tiers.hold(self.full[begin:end])
            self._ledger.take("parameters", self.full.nbytes)
            if policy.placement.optimizer:
                exact = exact[begin:end]
        if self.trainable:
            self._make_master(exact)

    def _adopt_encoded(self, encoding: Encoding) -> None:
        """The same values as ``shard``, packed; from weight files without more than a segment of fp32."""
        device = self._communicator.device
        begin, end = 0, self.layout.size
        if self.policy.placement.parameters:
            begin, end = self.layout.shard_range(self._communicator.shard_index)
        if self.parameters[0].is_meta:
            packed = encode(
                encoding, lambda a, b: self._read(begin + a, begin + b, device), end - begin, device
            )
            self._leave_meta(device)
        else:
            exact = self._collect(device)[begin:end]
            packed = encode(encoding, lambda a, b: exact[a:b], end - begin, device)
        tier = self.policy.homes.shards if self.policy.placement.parameters else "device"
        self.shard = self.policy.tiers.keep(packed, torch.uint8, tier, "parameters")
        self._buffer = self._arena.reserve(self.layout.size, self.policy.dtype, "parameters")
        self.full = self._arena.take(self._buffer)

    def _make_master(self, exact: Tensor) -> None:
        policy = self.policy
        if policy.homes.masters is None:
            self.master = self._updated
        else:
            self.master = policy.tiers.keep(exact, torch.float32, policy.homes.masters, "optimizer")

    @property
    def _updated(self) -> Values:
        """What an update of the master weights is for."""
        placement = self.policy.placement
        if placement.optimizer or placement.parameters:
            return self.shard
        return self.policy.tiers.hold(self.full)

    def _collect(self, device: torch.device) -> Tensor:
        """Rank 0's values of all parameters, in fp32; the originals are freed one by one."""
        exact = torch.zeros(self.layout.size, dtype=torch.float32, device=device)
        for slot, parameter in zip(self.layout.slots, self.parameters, strict=True):
            exact[slot.offset : slot.end].copy_(parameter.detach().reshape(-1))
            parameter.data = torch.empty(0, dtype=self.policy.dtype, device=device)
        self._communicator.broadcast(exact)
        return exact

    def _read(self, begin: int, end: int, device: torch.device) -> Tensor:
        """Elements [begin, end) of the flat buffer from the weight files, in fp32."""
        if self.policy.weights is None:
            raise ValueError(
                f"parameter {self.layout.slots[0].name} is on the meta device and has no values: pass "
                "weights= to ZeroEngine, or build the model on a real device"
            )
        exact = torch.zeros(end - begin, dtype=torch.float32, device=device)
        for piece in self.layout.pieces(begin, end):
            values = self.policy.weights.read(piece.slot.name, piece.start, piece.length)
            exact[piece.offset - begin : piece.offset - begin + piece.length].copy_(values)
        return exact

    def _leave_meta(self, device: torch.device) -> None:
        for parameter in self.parameters:
            # ``parameter.data = ...`` can't leave the meta device; a swap keeps the Parameter object.
            real = torch.empty(0, dtype=self.policy.dtype, device=device)
            torch.utils.swap_tensors(parameter, nn.Parameter(real, requires_grad=parameter.requires_grad))

    def thaw(self) -> None:
        """Parameters that were frozen are trained from now on: they get master weights.

        Raises ValueError where they are encoded.
        """
        assert not self.trainable
        if self.encoding is not None:
            slots = zip(self.layout.slots, self.parameters, strict=True)
            name = next(slot.name for slot, parameter in slots if parameter.requires_grad)
            raise ValueError(
                f"{name} can't be trained from now on: it was frozen when the engine was built, which keeps "
                "it in fewer bytes than the precision has (frozen_quantization, or the dtype it was stored "
                "in). Set requires_grad=True before, or leave frozen_quantization out and give the model in "
                "the precision's dtype"
            )
        self.trainable = True
        updated = self._updated
        loan = updated.borrow(0, updated.numel)
        self._make_master(loan.wait())
        loan.give_back(changed=False)

    # Where things are.

    @property
    def master_range(self) -> tuple[int, int]:
        """The part of the flat buffer that this rank's optimizer updates."""
        if self.policy.placement.optimizer:
            return self.layout.shard_range(self._communicator.shard_index)
        return 0, self.layout.size

    def master_pieces(self, begin: int, end: int) -> list[Piece]:
        """The parts of parameters that lie in elements [begin, end) of the master weights."""
        first, _ = self.master_range
        return self.layout.pieces(first + begin, first + end)

    def slots(self) -> Iterator[tuple[Slot, nn.Parameter, Tensor]]:
        """Each parameter with its place and its view of ``full``."""
        return zip(self.layout.slots, self.parameters, self._views, strict=True)

    # Gather and release.

    @property
    def transient(self) -> bool:
        """Parameters are there between ``gather`` and ``release`` alone."""
        return self._buffer is not None

    def gather(self) -> Handle | None:
        """Start to fill ``full`` from the shards; nothing to do where parameters are whole or present."""
        if self.present:
            return None
        self.present = True
        if self.encoding is not None:
            return self._gather_encoded(self.encoding)
        self._make_present()
        return self._start_gather(self.full)

    def read_ahead(self) -> None:
        """Start to read what the next gather starts from, where it is not on the device."""
        if self.shard.resident is not None or self.present or self._landing is not None:
            return
        if self.encoding is None:
            assert self._buffer is not None
            self._landing = self._arena.take(self._buffer)
        else:
            self._landing = self._borrow_for_gather()
        self._reading = self.shard.bring(self._own_part(self._landing))

    def _own_part(self, target: Tensor) -> Tensor:
        return target.chunk(self.layout.world_size)[self._communicator.shard_index]

    def _gather_encoded(self, encoding: Encoding) -> Handle:
        """``full`` has memory once what is packed has arrived, and not before."""
        if not self.policy.placement.parameters:
            assert self.shard.resident is not None
            packed = self.shard.resident
            return Handle([], lambda: self._decode(encoding, [packed]))
        everyones = self._borrow_for_gather() if self._landing is None else self._landing
        handle = self._start_gather(everyones)

        def unpack() -> None:
            handle.wait()
            self._decode(encoding, list(everyones.chunk(self.layout.world_size)))
            self._arena.give_back(everyones)

        return Handle([], unpack)

    def _decode(self, encoding: Encoding, packed: list[Tensor]) -> None:
        self._make_present()
        for part, values in zip(packed, self.full.chunk(len(packed)), strict=True):
            decode(encoding, part, values)

    def _make_present(self) -> None:
        assert self._buffer is not None
        if not self._buffer.taken:
            self._arena.take(self._buffer)
        self._point_at(self._views)

    def _borrow_for_gather(self) -> Tensor:
        """Where everybody's shards can go, in the dtype that they travel in."""
        dtype = self.policy.dtype if self.encoding is None else torch.uint8
        return self._arena.borrow(self.shard.numel * self.layout.world_size, dtype, "communication")

    def take_part(self) -> Handle | None:
        """Take part in a gather that another rank needs, without a use for it here."""
        if not self.policy.placement.parameters:
            return None
        scratch = self._borrow_for_gather()
        handle = self._start_gather(scratch)

        def drop() -> None:
            handle.wait()
            self._arena.give_back(scratch)

        return Handle([], drop)

    def release(self) -> None:
        """Free the full parameters where they come and go; the shard stays."""
        if self._buffer is None:
            return
        if not self.present:
            self._forget_what_was_read()
            return
        self._point_at(self._poison)
        self._arena.give(self._buffer)
        self.present = False

    def _forget_what_was_read(self) -> None:
        """The gather that it was for does not come in this pass."""
        if self._landing is None:
            return
        assert self._reading is not None
        assert self._buffer is not None
        self._reading.wait()
        if self.encoding is None:
            self._arena.give(self._buffer)
        else:
            self._arena.give_back(self._landing)
        self._landing = self._reading = None

    def _start_gather(self, target: Tensor) -> Handle:
        communicator = self._communicator
        if self.layout.world_size == 1:
            self._find_shard(target)
            return Handle([])
        communicator.traffic.gathered += self.layout.size
        if communicator.mesh.secondary_size == 1:
            return self._gather_all(target)
        if self._secondary_valid:
            assert self._secondary is not None
            return communicator.all_gather(communicator.secondary, target, self._secondary, stable=True)
        # Set at once, so that the order of waits can't make ranks choose different groups.
        self._secondary_valid = True
        handle = self._gather_all(target)

        def finish() -> None:
            handle.wait()
            self._keep_secondary(target)

        return Handle([], finish)

    def _gather_all(self, target: Tensor) -> Handle:
        """From the shards of the whole shard group."""
        groups, shard = self._communicator.gathering, self._find_shard(target)
        quantizer = self.policy.quantizer if self.encoding is None else None
        if quantizer is None:
            # No optimizer touches it before all ranks have agreed on the step's gradient; what was only
            # read for this gather goes with it.
            stable = self.shard.resident is not None
            return self._communicator.gather_shards(groups, target, shard, stable=stable, places=self._places)
        group = groups.inside
        packed_size = quantizer.packed_bytes(shard.numel())
        everyones = self._arena.borrow(packed_size * group.size, torch.uint8, "communication")
        parts = everyones.chunk(group.size)
        quantizer.quantize(shard, parts[group.rank])

        def unpack() -> None:
            for packed, values in zip(parts, target.chunk(group.size), strict=True):
                quantizer.dequantize(packed, values)
            self._arena.give_back(everyones)

        return self._communicator.all_gather(group, everyones, parts[group.rank], unpack)

    def _find_shard(self, target: Tensor) -> Tensor:
        """This rank's shard in memory: in its place in ``target`` where it is read for this gather."""
        if self.shard.resident is not None:
            return self.shard.resident
        own = self._own_part(target)
        if self._landing is target:
            assert self._reading is not None
            self._reading.wait()
            self._landing = self._reading = None
        else:
            self.shard.bring(own).wait()
        return own

    def _keep_secondary(self, full: Tensor) -> None:
        group = self._communicator.secondary
        if self._secondary is None:
            self._secondary = torch.empty_like(full.chunk(group.size)[0])
            self._ledger.take("parameters", self._secondary.nbytes)
        self._secondary.copy_(full.chunk(group.size)[group.rank])

    def _point_at(self, places: list[Tensor]) -> None:
        for parameter, place in zip(self.parameters, places, strict=True):
            parameter.data = place

    # After an update.

    def publish(self, begin: int, end: int, masters: Tensor) -> None:
        """Bring ``masters``, elements [begin, end) of the master weights, to where gathers read them."""
        assert self.master is not None
        if self.policy.homes.masters is None:
            return
        loan = self._updated.borrow(begin, end, read=False)
        loan.wait().copy_(masters)
        loan.give_back(changed=True)

    def forget_secondary(self) -> None:
        """What the secondary shard was gathered from has changed, on this rank or another."""
        self._secondary_valid = False

    def refresh(self) -> Handle | None:
        """Gather what all ranks have published, where forward doesn't do it."""
        placement = self.policy.placement
        if self.master is None or placement.parameters or not placement.optimizer:
            return None
        self._communicator.traffic.gathered += self.full.numel()
        return self._gather_all(self.full)
