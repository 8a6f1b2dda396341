"""One flat parameter: the storage behind some of a unit's parameters, their gradients and their shard.

Who owns memory when, at N ranks (P elements, padding included):

- ``full`` (P, compute dtype): the parameters themselves are views of it. Permanent where parameters are
  whole; at stage 3 its storage exists between ``allocate`` and ``free`` only. The storage object is the
  same throughout, so a view that autograd saved (``weight.t()``) is valid again after the next gather.
- ``shard`` (P/N, compute dtype): what a gather starts from. At stage 3 a tensor of its own, else a view
  of ``full``.
- ``master`` (fp32): what the optimizer updates, P/N elements where optimizer state is sharded, else P.
  In fp32 it is no copy: a view of ``shard`` or ``full``.
- the gradient: accumulated in ``grad`` (P), from backward's first touch until it is reduced; then in
  ``grad_shard`` (P/N) at stages 2 and 3, in this rank's part of ``grad`` at stage 1, in all of it at 0.

A released parameter keeps its shape: it becomes a view of a single NaN with strides of zero, so that
``numel()`` and ``shape`` tell the truth and a read out of turn can't go unnoticed.
"""

import math

import torch
from torch import Tensor, nn

from zero_core.buffers import BufferPool
from zero_core.collectives import Communicator, Handle
from zero_core.layout import Layout, Piece, Slot
from zero_core.memory import Ledger
from zero_core.placement import Placement


class FlatParameter:
    def __init__(
        self,
        named_parameters: list[tuple[str, nn.Parameter]],
        *,
        dtype: torch.dtype,
        placement: Placement,
        communicator: Communicator,
        communication_dtype: torch.dtype,
        accumulate_in_fp32: bool,
        pool: BufferPool,
        ledger: Ledger,
    ) -> None:
        self.parameters = [parameter for _, parameter in named_parameters]
        self.trainable = self.parameters[0].requires_grad
        self.placement = placement
        self._communicator = communicator
        self._communication_dtype = communication_dtype
        self._pool = pool
        self._ledger = ledger
        shapes = [(name, tuple(parameter.shape)) for name, parameter in named_parameters]
        self.layout = Layout.pack(shapes, communicator.world_size)
        self.slot_of = {id(parameter): i for i, parameter in enumerate(self.parameters)}
        self.gradient_dtype = torch.float32 if accumulate_in_fp32 else dtype

        self.full, self.master = self._adopt(dtype)
        self._views = [self.full[slot.offset : slot.end].view(slot.shape) for slot in self.layout.slots]
        self._poison = torch.full((), math.nan, dtype=dtype, device=self.full.device)
        begin, end = self.layout.shard_range(communicator.rank)
        self.shard = self.full[begin:end].clone() if placement.parameters else self.full[begin:end]
        if self.master is None and self.trainable:
            self.master = self.shard if placement.optimizer else self.full
        self.present = True
        self._charge_state(dtype)
        self._point_at_views()

        self.grad: Tensor | None = None
        self.grad_shard: Tensor | None = None
        self._filled = [False] * len(self.parameters)
        self.used = [False] * len(self.parameters)
        """Which parameters received a gradient on this rank since the last step."""

    # Construction.

    def _adopt(self, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Rank 0's values as one flat buffer, and as fp32 masters where the compute dtype is lower."""
        device = self.parameters[0].device
        exact = torch.zeros(self.layout.size, dtype=torch.float32, device=device)
        for slot, parameter in zip(self.layout.slots, self.parameters, strict=True):
            exact[slot.offset : slot.end].copy_(parameter.detach().reshape(-1))
            parameter.data = torch.empty(0, dtype=dtype, device=device)
        self._communicator.broadcast(exact)
        if dtype == torch.float32:
            return exact, None
        if not self.trainable:
            return exact.to(dtype), None
        begin, end = self.master_range
        return exact.to(dtype), exact[begin:end].clone()

    def _charge_state(self, dtype: torch.dtype) -> None:
        self._ledger.take("parameters", self.full.nbytes)
        if self.placement.parameters:
            self._ledger.take("parameters", self.shard.nbytes)
        if self.trainable and dtype != torch.float32:
            assert self.master is not None
            self._ledger.take("optimizer", self.master.nbytes)

    # Where things are.

    @property
    def master_range(self) -> tuple[int, int]:
        """The part of the flat buffer that this rank's optimizer updates."""
        if self.placement.optimizer:
            return self.layout.shard_range(self._communicator.rank)
        return 0, self.layout.size

    def master_pieces(self) -> list[tuple[Piece, Tensor]]:
        """Each parameter's part that this rank updates, as a view of the master weights."""
        assert self.master is not None
        begin, end = self.master_range
        return [
            (piece, self.master[piece.offset - begin : piece.offset - begin + piece.length])
            for piece in self.layout.pieces(begin, end)
        ]

    def slots(self) -> list[tuple[Slot, nn.Parameter, Tensor]]:
        """Each parameter with its place and its view of ``full``."""
        return list(zip(self.layout.slots, self.parameters, self._views, strict=True))

    # Parameters: gather and release.

    def gather(self) -> Handle | None:
        """Start to fill ``full`` from the shards; nothing to do where parameters are whole or present."""
        if self.present:
            return None
        self.full.untyped_storage().resize_(self.full.numel() * self.full.element_size())
        self._ledger.take("parameters", self.full.nbytes)
        handle = self._communicator.all_gather(self.full, self.shard)
        self.present = True
        self._point_at_views()
        return handle

    def release(self) -> None:
        """Free the full parameters at stage 3; the shard stays."""
        if not self.placement.parameters or not self.present:
            return
        for slot, parameter in zip(self.layout.slots, self.parameters, strict=True):
            parameter.data = self._poison.expand(slot.shape)
        self._ledger.give("parameters", self.full.nbytes)
        self.full.untyped_storage().resize_(0)
        self.present = False

    def _point_at_views(self) -> None:
        for parameter, view in zip(self.parameters, self._views, strict=True):
            parameter.data = view

    # Gradients: accumulate, reduce, hand over.

    def accumulate(self, parameter: nn.Parameter) -> None:
        """Move a parameter's finished gradient into the flat one."""
        assert parameter.grad is not None
        if self.grad is None:
            self.grad = self._pool.take(self.layout.size, self.gradient_dtype, "gradients")
        index = self.slot_of[id(parameter)]
        slot = self.layout.slots[index]
        target = self.grad[slot.offset : slot.end].view(slot.shape)
        if self._filled[index]:
            target += parameter.grad
        else:
            target.copy_(parameter.grad)
        parameter.grad = None
        self._filled[index] = self.used[index] = True

    def reduce(self) -> Handle:
        """Start to sum the flat gradient over the ranks. Every rank calls it, used or not."""
        grad = self._complete_grad()
        self._filled = [False] * len(self.parameters)
        if self._communicator.world_size == 1:
            return Handle([])
        sent = grad.to(self._communication_dtype)
        if not self.placement.optimizer:
            return Handle([self._communicator.all_reduce(sent)], lambda: self._keep_whole(sent))
        return self._communicator.reduce_scatter(sent, self._keep_shard)

    def _complete_grad(self) -> Tensor:
        """The flat gradient with zeros where no parameter wrote, padding included."""
        if self.grad is None:
            self.grad = self._pool.take(self.layout.size, self.gradient_dtype, "gradients")
        for slot, filled in zip(self.layout.slots, self._filled, strict=True):
            if not filled:
                self.grad[slot.offset : slot.end].zero_()
        self.grad[self.layout.filled :].zero_()
        return self.grad

    def _keep_whole(self, reduced: Tensor) -> None:
        assert self.grad is not None
        if reduced is not self.grad:
            self.grad.copy_(reduced)

    def _keep_shard(self, reduced: Tensor) -> None:
        """Stage 1 keeps its part inside the full gradient; stages 2 and 3 free that and add to a shard."""
        assert self.grad is not None
        if not self.placement.gradients:
            begin, end = self.layout.shard_range(self._communicator.rank)
            self.grad[begin:end].copy_(reduced)
            return
        if self.grad_shard is None:
            self.grad_shard = self._pool.take(self.layout.shard_size, self.gradient_dtype, "gradients")
            self.grad_shard.zero_()
        self.grad_shard += reduced
        self._pool.give(self.grad, "gradients")
        self.grad = None

    def reduced_grad(self) -> Tensor:
        """The summed gradient of ``master_range``."""
        if self.placement.gradients:
            assert self.grad_shard is not None
            return self.grad_shard
        assert self.grad is not None
        begin, end = self.master_range
        return self.grad[begin:end]

    def finish_step(self) -> None:
        """Forget the step's gradient; its buffers stay."""
        if self.grad_shard is not None:
            self.grad_shard.zero_()
        self.used = [False] * len(self.parameters)

    # After an update.

    def refresh(self) -> Handle | None:
        """Bring the updated master weights back to where forward reads them, on every rank."""
        if self.master is None:
            return None
        target = self.shard if self.placement.optimizer else self.full
        if self.master.data_ptr() != target.data_ptr():
            target.copy_(self.master)
        if self.placement.optimizer and not self.placement.parameters:
            return self._communicator.all_gather(self.full, self.shard)
        return None
