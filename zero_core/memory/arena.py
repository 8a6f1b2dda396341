"""Memory for buffers that live for part of a step: gathered parameters, gradients, what is received.

A buffer keeps its address for life, since autograd saves views of it (``weight.t()``) that must be valid
again after the next gather; its memory comes when it is taken and goes when it is given back.

- On CUDA, and for small buffers, the allocator does that well: the storage is resized.
- On the CPU a fresh allocation costs a page fault every 4 KiB, which doubles a stage 3 step. So the
  memory itself is kept and moves: a buffer that is taken gets chunks of 2 MiB from idle buffers by
  mremap(2), which moves page table entries and copies nothing. What the process holds is then the most
  that was ever in use at once, whatever the sizes.
"""

import ctypes
import mmap
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from zero_core.config.offload import Tier
from zero_core.memory.heap import MAPPED, drop_pages, trim
from zero_core.memory.ledger import Category, Ledger

CHUNK = 2 << 20
"""Bytes that move at once: a huge page on the usual machines, so that a move is one table entry."""

SMALLEST_MAPPED = CHUNK
"""Bytes from which a buffer is mapped: below, rounding up to chunks costs more than faults do."""

# mman.h: keep the old range mapped (it faults in zeros if touched), and put the pages exactly there.
_MREMAP_MAYMOVE, _MREMAP_FIXED, _MREMAP_DONTUNMAP = 1, 2, 4
_MOVE = _MREMAP_MAYMOVE | _MREMAP_FIXED | _MREMAP_DONTUNMAP


@dataclass(eq=False)
class Buffer:
    """``tensor`` is valid between ``Arena.take`` and ``Arena.give``, and is the same tensor every time."""

    tensor: Tensor
    category: Category
    address: int | None
    """Start of the first chunk; None where the allocator is asked instead."""

    backed: set[int] = field(default_factory=set)
    """Chunks, by number, that have memory."""

    taken: bool = False

    @property
    def chunks(self) -> int:
        return -(-self.tensor.nbytes // CHUNK)


class Arena:
    def __init__(self, device: torch.device, ledger: Ledger, tier: Tier = "device") -> None:
        self._device = device
        self._ledger = ledger
        self._tier = tier
        self._move = _find_mremap() if device.type == "cpu" else None
        self._idle: dict[Buffer, None] = {}
        """Mapped buffers that were given back and still have chunks; the latest gives its chunks first."""
        self._spare: dict[tuple[int, torch.dtype], list[Buffer]] = {}
        self._borrowed: dict[int, Buffer] = {}
        self._gave_room = False

    def moves(self, nbytes: int) -> bool:
        """A buffer of that size gets its memory from other buffers, not from the allocator."""
        return self._move is not None and nbytes >= SMALLEST_MAPPED

    def reserve(self, numel: int, dtype: torch.dtype, category: Category) -> Buffer:
        """Address space for ``numel`` elements, without memory yet."""
        nbytes = numel * dtype.itemsize
        if not self.moves(nbytes):
            tensor = torch.empty(numel, dtype=dtype, device=self._device)
            tensor.untyped_storage().resize_(0)
            return Buffer(tensor, category, None)
        # One chunk more, so that an aligned start lies inside. The tensor keeps the mapping alive.
        mapping = mmap.mmap(-1, (-(-nbytes // CHUNK) + 1) * CHUNK, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        mapping.madvise(mmap.MADV_HUGEPAGE)
        start = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        padding = -start % CHUNK
        tensor = torch.frombuffer(mapping, dtype=torch.uint8, count=nbytes, offset=padding).view(dtype)
        return Buffer(tensor, category, start + padding)

    def take(self, buffer: Buffer) -> Tensor:
        """Give ``buffer`` memory, with arbitrary contents."""
        assert not buffer.taken, "taken twice"
        buffer.taken = True
        if buffer.address is None:
            buffer.tensor.untyped_storage().resize_(buffer.tensor.nbytes)
        else:
            fresh = self._back(buffer)
            self._charge_idle(fresh * CHUNK - buffer.tensor.nbytes)
        self._ledger.take(buffer.category, buffer.tensor.nbytes, self._tier)
        return buffer.tensor

    def give(self, buffer: Buffer) -> None:
        """Take the memory back; ``buffer.tensor`` must not be read until it is taken again."""
        assert buffer.taken, "given back without being taken"
        buffer.taken = False
        self._ledger.give(buffer.category, buffer.tensor.nbytes, self._tier)
        if buffer.address is None:
            buffer.tensor.untyped_storage().resize_(0)
        else:
            self._idle[buffer] = None
            self._charge_idle(buffer.tensor.nbytes)

    # Buffers for whoever needs one of a size, not always the same.

    def borrow(self, numel: int, dtype: torch.dtype, category: Category) -> Tensor:
        """A flat buffer with arbitrary contents, to be given back by ``give_back``."""
        spare = self._spare.get((numel, dtype))
        buffer = spare.pop() if spare else self.reserve(numel, dtype, category)
        buffer.category = category
        tensor = self.take(buffer)
        self._borrowed[id(tensor)] = buffer
        return tensor

    def give_back(self, tensor: Tensor) -> None:
        """Take back the very tensor that ``borrow`` returned."""
        buffer = self._borrowed.pop(id(tensor))
        self.give(buffer)
        self._spare.setdefault((tensor.numel(), tensor.dtype), []).append(buffer)

    # Room for others.

    def make_room(self, nbytes: int) -> None:
        """Before torch maps a gradient of ``nbytes``: as much of what is idle here goes, else in the heap."""
        if self._move is None or nbytes < MAPPED:
            return
        if sum(len(buffer.backed) for buffer in self._idle) * CHUNK < nbytes:
            trim(nbytes)
            return
        for _ in range(-(-nbytes // CHUNK)):
            drop_pages(self._give_chunk(next(iter(self._idle))), CHUNK)
            self._charge_idle(-CHUNK)
        self._gave_room = True

    def _replace(self, nbytes: int) -> None:
        """What made room is needed again: the heap gives once what it has to spare by now."""
        if self._gave_room:
            self._gave_room = False
            trim(nbytes)

    # Chunks.

    def _back(self, buffer: Buffer) -> int:
        """Give every chunk memory; the number of chunks that no idle buffer could give."""
        assert buffer.address is not None
        assert self._move is not None
        self._idle.pop(buffer, None)
        missing = [chunk for chunk in range(buffer.chunks) if chunk not in buffer.backed]
        buffer.backed.update(missing)
        for done, chunk in enumerate(missing):
            if not self._idle:
                # The kernel makes the others at their first touch.
                self._replace(nbytes=(len(missing) - done) * CHUNK)
                return len(missing) - done
            source = self._give_chunk(next(reversed(self._idle)))
            self._move(source, buffer.address + chunk * CHUNK)
        return 0

    def _give_chunk(self, donor: Buffer) -> int:
        """The address of a chunk that an idle buffer gives away."""
        assert donor.address is not None
        given = donor.backed.pop()
        if not donor.backed:
            del self._idle[donor]
        return donor.address + given * CHUNK

    def _charge_idle(self, nbytes: int) -> None:
        """What the process holds beyond the buffers in use, rounding included."""
        if nbytes >= 0:
            self._ledger.take("idle", nbytes, self._tier)
        else:
            self._ledger.give("idle", -nbytes, self._tier)


def _find_mremap() -> Callable[[int, int], None] | None:
    """A function that moves one chunk between addresses; None where the system can't."""
    if not sys.platform.startswith("linux"):
        return None
    mremap = ctypes.CDLL(None, use_errno=True).mremap
    mremap.restype = ctypes.c_void_p
    mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]

    def move(source: int, target: int) -> None:
        if mremap(source, CHUNK, CHUNK, _MOVE, target) != target:
            error = ctypes.get_errno()
            raise OSError(error, f"mremap: {os.strerror(error)}; is vm.max_map_count large enough?")

    with mmap.mmap(-1, 4 * CHUNK, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as probe:
        view = ctypes.c_char.from_buffer(probe)
        start = ctypes.addressof(view)
        del view
        aligned = start + -start % CHUNK
        try:
            move(aligned, aligned + CHUNK)
        except OSError:
            # Kernels before 5.7, and sandboxes, have no MREMAP_DONTUNMAP.
            return None
    return move
