import math
from itertools import pairwise

import pytest

from zero_core.sharding.layout import ALIGNMENT, Layout

SHAPES = [("a", (3, 5)), ("scalar", ()), ("b", (7,)), ("c", (40, 2))]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
def test_shards_are_equal_and_the_padding_is_less_than_a_line_a_rank(world_size: int) -> None:
    layout = Layout.pack(SHAPES, world_size)
    assert layout.filled == 15 + 1 + 7 + 80
    assert layout.size % (world_size * ALIGNMENT) == 0
    assert 0 <= layout.size - layout.filled < world_size * ALIGNMENT
    assert layout.shard_range(world_size - 1)[1] == layout.size


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
def test_every_element_of_every_parameter_is_in_exactly_one_piece(world_size: int) -> None:
    layout = Layout.pack(SHAPES, world_size)
    pieces = [p for rank in range(world_size) for p in layout.pieces(*layout.shard_range(rank))]
    for name, shape in SHAPES:
        own = [piece for piece in pieces if piece.slot.name == name]
        assert [piece.start for piece in own] == [0, *_running_sums([p.length for p in own])][:-1]
        assert sum(piece.length for piece in own) == math.prod(shape)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("block_size", [2, 64, 256])
def test_blocks_are_cut_by_no_parameter_and_no_shard(world_size: int, block_size: int) -> None:
    layout = Layout.pack(SHAPES, world_size, block_size)
    assert [slot.numel for slot in layout.slots] == [math.prod(shape) for _, shape in SHAPES]
    assert all(slot.offset % block_size == 0 for slot in layout.slots)
    assert all(a.end <= b.offset < a.end + block_size for a, b in pairwise(layout.slots))
    assert layout.shard_size % block_size == 0
    assert layout.shard_size % ALIGNMENT == 0
    assert layout.filled <= layout.size < layout.filled + world_size * max(block_size, ALIGNMENT)
    pieces = [p for rank in range(world_size) for p in layout.pieces(*layout.shard_range(rank))]
    assert sum(piece.length for piece in pieces) == sum(math.prod(shape) for _, shape in SHAPES)


def _running_sums(lengths: list[int]) -> list[int]:
    return [sum(lengths[: i + 1]) for i in range(len(lengths))]
