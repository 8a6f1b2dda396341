"""One flat parameter's gradient: accumulated from autograd, reduced over the ranks, handed to the optimizer.

Who owns memory when, at N ranks of a shard group (P elements, padding included):

- ``whole`` (P): from backward's first touch until its reduction starts, and then until that has ended.
- ``summed`` (P): at stages 0 and 1 the same memory until the step ends, with the sum in it.
- ``shard`` (P/N): the sum over ranks of this rank's part, from the first reduction until the step ends,
  at stages 2 and 3; of a ``whole`` that was mapped for itself it is a part, and the rest goes. At stage 1
  it is a part of ``summed``, at stage 0 all of it.
- ``error`` (P, with quantized gradients): what quantization lost, to be added to the next gradient.
- One rank alone keeps nothing: the gradient stays where autograd put it.

What is accumulated is the gradient of the loss's sum; nothing here divides (see ``engine``).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from zero_core.comm.collectives import Communicator, Handle
from zero_core.comm.quantization import BlockQuantizer
from zero_core.memory.arena import Arena
from zero_core.memory.heap import MAPPED, drop
from zero_core.memory.ledger import Ledger
from zero_core.memory.region import Region
from zero_core.sharding.layout import Layout, Piece
from zero_core.sharding.norm import chunk_norms
from zero_core.sharding.placement import Placement

Finish = Callable[[Tensor], None]
"""What a reduction calls with its sum."""
Release = Callable[[], None] | None
"""What a reduction calls once its source may change; without it, the source stays until the step."""


@dataclass(frozen=True)
class GradientPolicy:
    """How every flat gradient of an engine is kept."""

    placement: Placement
    dtype: torch.dtype
    """That gradients accumulate in: fp32 where several micro-batches make a step."""
    communication_dtype: torch.dtype
    quantizer: BlockQuantizer | None
    """Of reductions (qgZ)."""
    shards: Region
    """Where the shards of a step's gradients lie."""
    direct: bool
    """Autograd's own ``.grad`` is good enough: one rank, and nothing to accumulate in another dtype."""


class FlatGradient:
    def __init__(
        self,
        parameters: list[nn.Parameter],
        layout: Layout,
        owned: tuple[int, int],
        policy: GradientPolicy,
        communicator: Communicator,
        arena: Arena,
        ledger: Ledger,
    ) -> None:
        """``owned`` is the part of the flat buffer that this rank's optimizer updates."""
        self._parameters = parameters
        self._layout = layout
        self._owned = owned
        self._policy = policy
        self._communicator = communicator
        self._arena = arena
        self._ledger = ledger
        self._whole: Tensor | None = None
        self._adopted = False
        """``_whole`` is autograd's tensor, not the arena's."""
        self._summed: Tensor | None = None
        """What was ``_whole``, with this rank's part of the sum in it; at stages 0 and 1."""
        self._summed_adopted = False
        self._reduced = False
        """A reduction of this step has been started."""
        self._shard: Tensor | None = None
        self._shard_adopted = False
        self._error: Tensor | None = None
        self._spreading: Handle | None = None
        self._filled = [False] * len(parameters)
        self._used = [False] * len(parameters)
        self._charged = 0
        """Bytes of autograd's own gradients that are accounted for."""
        self._awaited: int | None = 0
        """Gradients of this backward that are still to come; None where nobody can know."""

    def expect(self, count: int | None) -> None:
        """At backward's start: how many gradients will come, if that is known."""
        self._awaited = count

    @property
    def complete(self) -> bool:
        """Every gradient of this backward has come."""
        return self._awaited == 0

    @property
    def direct(self) -> bool:
        """The gradient stays where autograd puts it."""
        return self._policy.direct

    @property
    def used(self) -> list[bool]:
        """Which parameters received a gradient on this rank since the last step."""
        if self._policy.direct:
            return [parameter.grad is not None for parameter in self._parameters]
        return self._used

    @property
    def pending(self) -> bool:
        """A gradient has arrived that no reduction has taken yet."""
        return any(self._filled)

    # Accumulate.

    def make_room(self) -> None:
        """Autograd is about to make the gradients, and maps large ones for themselves."""
        self._arena.make_room(max(parameter.nbytes for parameter in self._parameters))

    def accumulate(self, index: int) -> None:
        """Move the finished gradient of the parameter at ``index`` into the flat one."""
        parameter = self._parameters[index]
        grad = parameter.grad
        assert grad is not None
        parameter.grad = None
        if grad.layout is not torch.strided:
            grad = grad.to_dense()
        if self._whole is None and self._fits_exactly(grad):
            self._whole, self._adopted = grad.view(-1), True
            self._ledger.take("gradients", grad.nbytes)
        else:
            target = self._take_whole()[self._layout.slots[index].offset : self._layout.slots[index].end]
            if self._filled[index]:
                target += grad.reshape(-1)
            else:
                target.view(grad.shape).copy_(grad)
        self._filled[index] = self._used[index] = True
        if self._awaited is not None:
            self._awaited -= 1

    def _fits_exactly(self, grad: Tensor) -> bool:
        """A gradient that is alone in its flat one can become it without a copy."""
        return (
            len(self._parameters) == 1
            and grad.numel() == self._layout.size
            and grad.dtype == self._policy.dtype
            and grad.is_contiguous()
        )

    def _take_whole(self) -> Tensor:
        if self._whole is None:
            self._whole = self._arena.borrow(self._layout.size, self._policy.dtype, "gradients")
        return self._whole

    def _complete(self) -> Tensor:
        """The flat gradient with zeros where no parameter wrote, padding included."""
        whole = self._take_whole()
        if not self._adopted:
            for slot, filled in zip(self._layout.slots, self._filled, strict=True):
                if not filled:
                    whole[slot.offset : slot.end].zero_()
            whole[self._layout.filled :].zero_()
        return whole

    def _free(self, whole: Tensor, adopted: bool) -> None:
        if adopted:
            self._ledger.give("gradients", whole.nbytes)
        else:
            self._arena.give_back(whole)

    # Reduce.

    def reduce(self) -> Handle:
        """Start to sum the flat gradient over the shard group. Every rank calls it, used or not."""
        if self._policy.direct:
            return Handle([])
        whole, adopted = self._complete(), self._adopted
        self._filled = [False] * len(self._parameters)
        if self._communicator.mesh.shard_size == 1:
            return Handle([])
        # From here on the reduction owns it: a gradient that comes later starts a new one.
        self._whole, self._adopted = None, False
        self._communicator.traffic.reduced += whole.numel()
        is_first, self._reduced = not self._reduced, True
        if self._policy.placement.gradients:
            finish, release, into = self._sum_into_shard(whole, adopted, is_first)
        elif is_first:
            begin, end = self._layout.shard_range(self._communicator.shard_index)
            finish, release = partial(self._keep_sum, whole, adopted), None
            into = partial(_same, whole[begin:end])
        else:
            finish, release, into = self._add_late_sum, partial(self._free, whole, adopted), None
        if self._policy.quantizer is not None:
            return self._reduce_quantized(self._policy.quantizer, whole, finish, release)
        sent = whole.to(self._policy.communication_dtype)
        if release is None and sent is not whole:
            # The peers read a copy, which lasts only if its end is awaited.
            release = _nothing
        return self._communicator.reduce_to_shards(
            self._communicator.reducing, sent, finish, release, into=into
        )

    def _sum_into_shard(
        self, whole: Tensor, adopted: bool, is_first: bool
    ) -> tuple[Finish, Release, Callable[[], Tensor] | None]:
        """At stages 2 and 3: the shard gets the sum, and ``whole`` goes."""
        if not is_first:
            return self._add_to_shard, partial(self._free, whole, adopted), None
        if adopted and whole.nbytes >= MAPPED and not whole.is_cuda:
            # It was mapped for itself: a part of it becomes the shard without a copy, and the rest goes.
            begin, end = self._layout.shard_range(self._communicator.shard_index)
            self._shard, self._shard_adopted = whole[begin:end], True
            release = partial(self._drop_all_but, begin, end, whole)
        else:
            release = partial(self._free, whole, adopted)

        def fill(total: Tensor) -> None:
            shard = self._take_shard()
            if total is not shard:
                shard.copy_(total)

        return fill, release, self._take_shard

    def _add_to_shard(self, total: Tensor) -> None:
        assert self._shard is not None
        self._shard += total

    def _take_shard(self) -> Tensor:
        if self._shard is None:
            self._shard = self._policy.shards.borrow(self._layout.shard_size)
        return self._shard

    def _drop_all_but(self, begin: int, end: int, whole: Tensor) -> None:
        drop(whole[:begin])
        drop(whole[end:])
        self._ledger.give("gradients", whole.nbytes - whole[begin:end].nbytes)

    def _keep_sum(self, whole: Tensor, adopted: bool, total: Tensor) -> None:
        """At stages 0 and 1: this rank's part of ``whole`` becomes the sum."""
        begin, end = self._layout.shard_range(self._communicator.shard_index)
        self._summed, self._summed_adopted = whole, adopted
        if total.data_ptr() != whole[begin:end].data_ptr():
            whole[begin:end].copy_(total)
        if not self._policy.placement.optimizer:
            self._spread(whole, total)

    def _add_late_sum(self, total: Tensor) -> None:
        """Gradients come late at stage 3 only, here with ``accumulate_locally``."""
        assert self._summed is not None
        assert self._policy.placement.optimizer
        begin, end = self._layout.shard_range(self._communicator.shard_index)
        self._summed[begin:end] += total

    def _spread(self, whole: Tensor, total: Tensor) -> None:
        """Second half of stage 0's all-reduce: every rank gets every part, rounded alike."""
        groups, dtype = self._communicator.reducing, self._policy.communication_dtype
        self._communicator.traffic.reduced += whole.numel()
        if dtype == whole.dtype:
            begin, end = self._layout.shard_range(self._communicator.shard_index)
            # Nobody's part is overwritten before it was read: whoever offers its sum has read its parts.
            self._spreading = self._communicator.gather_shards(groups, whole, whole[begin:end], stable=True)
            return
        travelling = self._arena.borrow(whole.numel(), dtype, "communication")

        gathering = self._communicator.gather_shards(groups, travelling, total.to(dtype))

        def unpack() -> None:
            gathering.wait()
            whole.copy_(travelling)
            self._arena.give_back(travelling)

        self._spreading = Handle([], unpack)

    def _reduce_quantized(
        self, quantizer: BlockQuantizer, whole: Tensor, finish: Finish, release: Release
    ) -> Handle:
        """All-to-all of quantized parts, then a local sum in fp32 (Wang et al. 2023, section 4.3).

        What this rank's quantization loses is added to its next gradient: error feedback (Seide et al. 2014).
        """
        group = self._communicator.reducing.inside
        if self._error is None:
            self._error = torch.zeros(whole.numel(), dtype=torch.float32, device=whole.device)
            self._ledger.take("communication", self._error.nbytes)
        corrected = self._error.add_(whole)
        size = quantizer.packed_bytes(self._layout.shard_size)
        packed = self._arena.borrow(size * group.size, torch.uint8, "communication")
        scratch = torch.empty(self._layout.shard_size, dtype=torch.float32, device=whole.device)
        for part, values in zip(packed.chunk(group.size), corrected.chunk(group.size), strict=True):
            quantizer.quantize(values, part)
            quantizer.dequantize(part, scratch)
            values -= scratch
        self._communicator.traffic.bytes_sent += size * (group.size - 1)

        def sum_received(received: list[Tensor]) -> Tensor:
            total = torch.zeros(self._layout.shard_size, dtype=torch.float32, device=whole.device)
            for part in received:
                quantizer.dequantize(part, scratch)
                total += scratch
            return total

        def sent(total: Tensor) -> None:
            self._arena.give_back(packed)
            finish(total)
            if release is not None:
                release()

        return self._communicator.all_to_all(group, packed, sum_received, sent)

    def forget_error(self) -> None:
        """Start error feedback anew: after an overflow, and where a checkpoint is written or read."""
        if self._error is not None:
            self._error.zero_()

    def settle(self) -> None:
        """Every reduction that was waited for is complete on this rank when this returns."""
        if self._policy.direct:
            self._charge_direct()
        if self._spreading is not None:
            self._spreading.wait()
            self._spreading = None

    def _charge_direct(self) -> None:
        """Account for what autograd holds for us."""
        held = sum(parameter.grad.nbytes for parameter in self._parameters if parameter.grad is not None)
        self._ledger.take("gradients", held - self._charged)
        self._charged = held

    def sum_replicas(self) -> None:
        """Add up the replicas' sums, in fp32. Once a step, in one order on all ranks. Collective."""
        group = self._communicator.replicas
        if group.size == 1:
            return
        mine = self.reduced()
        self._communicator.traffic.replicated += 2 * mine.numel()
        exact = mine.float()
        self._communicator.all_reduce(group, exact).wait()
        if exact is not mine:
            mine.copy_(exact)

    # What the step reads.

    def reduced(self) -> Tensor:
        """The summed gradient of the part that this rank updates, 1-D."""
        placement = self._policy.placement
        if placement.gradients:
            assert self._shard is not None
            return self._shard
        whole = self._whole if self._summed is None else self._summed
        assert whole is not None
        begin, end = self._owned
        return whole[begin:end]

    def chunk_norms(self) -> list[Tensor]:
        """Of this rank's shard of the summed gradient: every element counts on one rank only."""
        if self._policy.direct:
            grads = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
            return [norms for grad in grads for norms in chunk_norms(grad.reshape(-1))]
        reduced = self.reduced()
        if not self._policy.placement.optimizer:
            begin, end = self._layout.shard_range(self._communicator.shard_index)
            reduced = reduced[begin:end]
        return chunk_norms(reduced)

    def of(self, piece: Piece, index: int) -> Tensor:
        """The summed gradient of one piece of the parameter at ``index``, 1-D."""
        if self._policy.direct:
            grad = self._parameters[index].grad
            assert grad is not None
            return grad.reshape(-1)[piece.start : piece.start + piece.length]
        begin, _ = self._owned
        return self.reduced()[piece.offset - begin : piece.offset - begin + piece.length]

    def finish_step(self) -> None:
        """Forget the step's gradient."""
        if self._policy.direct:
            for parameter in self._parameters:
                parameter.grad = None
            self._ledger.give("gradients", self._charged)
            self._charged = 0
        if self._whole is not None:
            self._free(self._whole, self._adopted)
            self._whole, self._adopted = None, False
        if self._summed is not None:
            self._free(self._summed, self._summed_adopted)
            self._summed = None
        if self._shard is not None:
            if self._shard_adopted:
                self._ledger.give("gradients", self._shard.nbytes)
            else:
                self._policy.shards.give_back(self._shard)
            self._shard, self._shard_adopted = None, False
        self._reduced = False
        self._used = [False] * len(self._parameters)


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _nothing() -> None:
    pass
