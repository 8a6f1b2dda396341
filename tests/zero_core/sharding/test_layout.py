import math

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


def _running_sums(lengths: list[int]) -> list[int]:
    return [sum(lengths[: i + 1]) for i in range(len(lengths))]
