"""One flat parameter: the storage behind some of a unit's parameters, and their shard.

Who owns memory when, at N ranks of a shard group (P elements, padding included):

- ``full`` (P, compute dtype): the parameters themselves are views of it. Permanent where parameters are
  whole; at stage 3 it has memory between ``gather`` and ``release`` only. Its address is the same
  throughout, so a view that autograd saved (``weight.t()``) is valid again after the next gather.
- ``shard`` (P/N, compute dtype): what a gather starts from. At stage 3 a tensor of its own, else a view
  of ``full``.
- the secondary shard (P/H, compute dtype, H ranks of a node; hpZ): filled by a gather over all ranks,
  and what the next gathers start from until the weights change.
- encoded (frozen parameters alone, see ``encoding``): ``shard`` is the packed form, in bytes, of P/N
  elements, or of all P where parameters are whole; so is the secondary shard of P/H. ``full`` has memory
  between ``gather`` and ``release`` only, wherever parameters are.
- ``master`` (fp32): what the optimizer updates, P/N elements where optimizer state is sharded, else P.
  In fp32 it is no copy: a view of ``shard`` or ``full``.
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
from zero_core.sharding.encoding import Encoding, decode, encode
from zero_core.sharding.flat_gradient import FlatGradient, GradientPolicy
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
        self.master: Tensor | None = None
        self._buffer: Buffer | None = None
        if encoding is None:
            self._adopt()
            gradients.shards.plan(self.layout.shard_size)
        else:
            # Never trained: its gradient needs no place.
            self._adopt_encoded(encoding)
        self._places: list[int] | None = None
        if policy.placement.optimizer:
            self._places = communicator.settle_places(self.shard)
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
            mine = exact[begin - needed[0] : end - needed[0]]
            self.shard = mine.to(policy.dtype, copy=_is_part(mine))
            self._buffer = self._arena.reserve(layout.size, policy.dtype, "parameters")
            self.full = self._arena.take(self._buffer)
        else:
            self.full = exact.to(policy.dtype)
            self.shard = self.full[begin:end]
            mine = exact[begin:end]
        self._ledger.take("parameters", self.shard.nbytes if self._buffer else self.full.nbytes)
        if self.trainable:
            self._make_master(exact if not policy.placement.optimizer else mine)

    def _adopt_encoded(self, encoding: Encoding) -> None:
        """The same values as ``shard``, packed; from weight files without more than a segment of fp32."""
        device = self._communicator.device
        begin, end = 0, self.layout.size
        if self.policy.placement.parameters:
            begin, end = self.layout.shard_range(self._communicator.shard_index)
        if self.parameters[0].is_meta:
            self.shard = encode(
                encoding, lambda a, b: self._read(begin + a, begin + b, device), end - begin, device
            )
            self._leave_meta(device)
        else:
            exact = self._collect(device)[begin:end]
            self.shard = encode(encoding, lambda a, b: exact[a:b], end - begin, device)
        self._ledger.take("parameters", self.shard.nbytes)
        self._buffer = self._arena.reserve(self.layout.size, self.policy.dtype, "parameters")
        self.full = self._arena.take(self._buffer)

    def _make_master(self, exact: Tensor) -> None:
        if self.policy.dtype == torch.float32:
            self.master = self.shard if self.policy.placement.optimizer else self.full
        else:
            self.master = exact.to(torch.float32, copy=_is_part(exact))
            self._ledger.take("optimizer", self.master.nbytes)

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
        self._make_master(self.shard if self.policy.placement.optimizer else self.full)

    # Where things are.

    @property
    def master_range(self) -> tuple[int, int]:
        """The part of the flat buffer that this rank's optimizer updates."""
        if self.policy.placement.optimizer:
            return self.layout.shard_range(self._communicator.shard_index)
        return 0, self.layout.size

    def master_pieces(self) -> list[tuple[Piece, Tensor]]:
        """Each parameter's part that this rank updates, as a view of the master weights."""
        assert self.master is not None
        begin, end = self.master_range
        return [
            (piece, self.master[piece.offset - begin : piece.offset - begin + piece.length])
            for piece in self.layout.pieces(begin, end)
        ]

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

    def _gather_encoded(self, encoding: Encoding) -> Handle:
        """``full`` has memory once what is packed has arrived, and not before."""
        if not self.policy.placement.parameters:
            return Handle([], lambda: self._decode(encoding, [self.shard]))
        everyones = self._borrow_for_gather()
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
        self._arena.take(self._buffer)
        self._point_at(self._views)

    def _borrow_for_gather(self) -> Tensor:
        """Where everybody's shards can go, in the dtype that they travel in."""
        shard = self.shard
        return self._arena.borrow(shard.numel() * self.layout.world_size, shard.dtype, "communication")

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
        if self._buffer is None or not self.present:
            return
        self._point_at(self._poison)
        self._arena.give(self._buffer)
        self.present = False

    def _start_gather(self, target: Tensor) -> Handle:
        communicator = self._communicator
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
        groups, shard = self._communicator.gathering, self.shard
        quantizer = self.policy.quantizer if self.encoding is None else None
        if quantizer is None:
            # No optimizer touches it before all ranks have agreed on the step's gradient.
            return self._communicator.gather_shards(groups, target, shard, stable=True, places=self._places)
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

    def publish(self) -> None:
        """Bring the updated master weights to where this rank's gathers, and the others', read them."""
        self._secondary_valid = False
        if self.master is None:
            return
        target = self.shard if self.policy.placement.optimizer else self.full
        if self.master.data_ptr() != target.data_ptr():
            target.copy_(self.master)

    def refresh(self) -> Handle | None:
        """Gather what all ranks have published, where forward doesn't do it."""
        placement = self.policy.placement
        if self.master is None or placement.parameters or not placement.optimizer:
            return None
        self._communicator.traffic.gathered += self.full.numel()
        return self._gather_all(self.full)


def _is_part(values: Tensor) -> bool:
    """To keep these as they are would keep more memory than theirs."""
    return values.untyped_storage().nbytes() > values.nbytes
