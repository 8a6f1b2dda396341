"""Memory for tensors that come one after the other and go together, such as the shards of a step's gradients.

Each begins where the one before it ends, so that chunks are rounded up to once and not for every tensor:
shards of 2.75 MiB in chunks of their own took a quarter of a byte a parameter (docs/decisions/0014).
"""

import torch
from torch import Tensor

from zero_core.memory.arena import CHUNK, Arena, Buffer
from zero_core.memory.ledger import Category, Ledger


class Region:
    def __init__(self, arena: Arena, ledger: Ledger, dtype: torch.dtype, category: Category) -> None:
        self._arena = arena
        self._ledger = ledger
        self._dtype = dtype
        self._category = category
        self._planned = 0
        self._space: Tensor | None = None
        self._chunks: list[Buffer] = []
        self._end = 0
        """Elements of ``_space`` that are in use."""
        self._taken = 0
        """Of ``_chunks``, in order."""
        self._borrowed = 0
        """Tensors."""

    def plan(self, numel: int) -> None:
        """Count on one more tensor, of ``numel`` elements; before the first is borrowed."""
        assert self._space is None
        self._planned += numel

    def borrow(self, numel: int) -> Tensor:
        """A flat tensor that was planned, with arbitrary contents."""
        if not self._arena.moves(self._planned * self._dtype.itemsize):
            return self._arena.borrow(numel, self._dtype, self._category)
        if self._space is None:
            self._space = self._reserve()
        begin, self._end = self._end, self._end + numel
        assert self._end <= self._planned, "more was borrowed than planned"
        while self._taken * CHUNK < self._end * self._dtype.itemsize:
            self._arena.take(self._chunks[self._taken])
            self._taken += 1
        tensor = self._space[begin : self._end]
        self._borrowed += 1
        self._ledger.give("idle", tensor.nbytes)
        self._ledger.take(self._category, tensor.nbytes)
        return tensor

    def give_back(self, tensor: Tensor) -> None:
        """Take back the very tensor that ``borrow`` returned; the memory goes with the last one."""
        if self._space is None:
            self._arena.give_back(tensor)
            return
        self._borrowed -= 1
        self._ledger.give(self._category, tensor.nbytes)
        self._ledger.take("idle", tensor.nbytes)
        if not self._borrowed:
            for chunk in self._chunks[: self._taken]:
                self._arena.give(chunk)
            self._taken = self._end = 0

    def _reserve(self) -> Tensor:
        """Address space for all, each chunk of it a buffer of the arena.

        Until a tensor is borrowed in it a chunk counts as ``idle``.
        """
        space = self._arena.reserve(self._planned, self._dtype, self._category)
        assert space.address is not None
        parts = space.tensor.split(CHUNK // self._dtype.itemsize)
        self._chunks = [
            Buffer(part, "idle", space.address + number * CHUNK) for number, part in enumerate(parts)
        ]
        return space.tensor
