"""How parameters lie in one flat buffer, and which part of it a rank owns. Pure arithmetic.

A flat buffer of P elements is cut into N equal shards; P is padded up to a multiple of N times
``ALIGNMENT`` so that every shard starts on a cache line. Where blocks of elements are encoded together,
every parameter and every shard starts at a multiple of the block. Rank r owns [r P/N, (r + 1) P/N), and of a
parameter exactly the part of it that lies in there: its piece on that rank, which may be empty.
"""

import math
from dataclasses import dataclass

ALIGNMENT = 16
"""Elements: one cache line of fp32."""


@dataclass(frozen=True)
class Slot:
    """One parameter's place in the flat buffer."""

    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def end(self) -> int:
        return self.offset + self.numel


@dataclass(frozen=True)
class Piece:
    """The elements [start, start + length) of one flattened parameter; ``offset`` in the flat buffer."""

    slot: Slot
    start: int
    length: int

    @property
    def offset(self) -> int:
        return self.slot.offset + self.start


@dataclass(frozen=True)
class Layout:
    slots: tuple[Slot, ...]
    world_size: int
    block_size: int = 1

    @classmethod
    def pack(
        cls, shapes: list[tuple[str, tuple[int, ...]]], world_size: int, block_size: int = 1
    ) -> "Layout":
        slots = []
        offset = 0
        for name, shape in shapes:
            slots.append(Slot(name, shape, _round_up(offset, block_size)))
            offset = slots[-1].end
        return cls(tuple(slots), world_size, block_size)

    @property
    def filled(self) -> int:
        """Where the last parameter ends; the rest up to ``size`` is padding."""
        return self.slots[-1].end

    @property
    def size(self) -> int:
        return _round_up(self.filled, self.world_size * math.lcm(ALIGNMENT, self.block_size))

    @property
    def shard_size(self) -> int:
        return self.size // self.world_size

    def shard_range(self, rank: int) -> tuple[int, int]:
        return rank * self.shard_size, (rank + 1) * self.shard_size

    def pieces(self, begin: int, end: int) -> list[Piece]:
        """The non-empty parts of parameters inside [begin, end) of the flat buffer, in order."""
        pieces = []
        for slot in self.slots:
            first, last = max(begin, slot.offset), min(end, slot.end)
            if first < last:
                pieces.append(Piece(slot, first - slot.offset, last - first))
        return pieces


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
