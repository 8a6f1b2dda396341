"""One step's shards behind each other in chunks of the arena."""

import sys

import pytest
import torch

from zero_core.memory.arena import CHUNK, Arena
from zero_core.memory.ledger import Ledger
from zero_core.memory.region import Region

AWKWARD = (CHUNK + CHUNK // 4) // 4
"""fp32 elements of a chunk and a quarter: alone it would take two."""

needs_mremap = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory moves on Linux only")


def region_for(arena: Arena, ledger: Ledger, *sizes: int) -> Region:
    region = Region(arena, ledger, torch.float32, "gradients")
    for size in sizes:
        region.plan(size)
    return region


@pytest.mark.parametrize("size", [16, AWKWARD])
def test_tensors_in_use_at_once_do_not_share(arena: Arena, ledger: Ledger, size: int) -> None:
    region = region_for(arena, ledger, size, 0, size, size)
    for _ in range(2):
        tensors = [region.borrow(each) for each in (size, 0, size, size)]
        for value, tensor in enumerate(tensors):
            tensor.fill_(value)
        assert [tensor.unique().tolist() for tensor in tensors] == [[0.0], [], [2.0], [3.0]]
        for tensor in tensors:
            region.give_back(tensor)


@needs_mremap
def test_chunks_are_rounded_up_to_once(arena: Arena, ledger: Ledger) -> None:
    region = region_for(arena, ledger, *[AWKWARD] * 4)
    tensors = [region.borrow(AWKWARD) for _ in range(4)]
    assert ledger.current("gradients") == 4 * tensors[0].nbytes
    assert ledger.owned() == 5 * CHUNK
    for tensor in tensors:
        region.give_back(tensor)
    assert ledger.current("gradients") == 0
    assert ledger.current("idle") == 5 * CHUNK


@needs_mremap
def test_memory_comes_as_it_is_needed_and_goes_with_the_last(arena: Arena, ledger: Ledger) -> None:
    region = region_for(arena, ledger, *[AWKWARD] * 4)
    first = region.borrow(AWKWARD)
    assert ledger.owned() == 2 * CHUNK
    second = region.borrow(AWKWARD)
    region.give_back(first)
    other = arena.borrow(2 * CHUNK // 4, torch.float32, "parameters")
    assert ledger.owned() == 5 * CHUNK, "what is in use was given away"
    arena.give_back(other)
    region.give_back(second)
    arena.borrow(5 * CHUNK // 4, torch.float32, "parameters")
    assert ledger.owned() == 5 * CHUNK, "what is idle was not given away"


def test_no_more_than_was_planned(arena: Arena, ledger: Ledger) -> None:
    region = region_for(arena, ledger, 2 * AWKWARD)
    region.borrow(2 * AWKWARD)
    with pytest.raises(AssertionError, match="more was borrowed than planned"):
        region.borrow(1)
