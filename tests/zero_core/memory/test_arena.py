"""Memory that moves between buffers; here the real mremap."""

import sys

import pytest
import torch

from zero_core.memory import arena as arena_module
from zero_core.memory.arena import CHUNK, Arena
from zero_core.memory.heap import MAPPED
from zero_core.memory.ledger import Ledger, resident

LARGE = 4 * CHUNK // 4
"""fp32 elements of four chunks."""


@pytest.mark.parametrize("numel", [10, LARGE, LARGE + 3])
def test_a_buffer_keeps_its_address_and_loses_its_memory(arena: Arena, numel: int) -> None:
    buffer = arena.reserve(numel, torch.float32, "parameters")
    first = arena.take(buffer)
    view = first[: numel // 2]
    first.fill_(1.0)
    arena.give(buffer)
    second = arena.take(buffer)
    second.fill_(2.0)
    assert first is second
    assert view.sum() == 2.0 * view.numel()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mremap is Linux's")
def test_chunks_move_so_that_many_buffers_hold_the_memory_of_one(arena: Arena, ledger: Ledger) -> None:
    buffers = [arena.reserve(8 * LARGE, torch.float32, "parameters") for _ in range(10)]
    before = resident().current
    for index, buffer in enumerate(buffers):
        tensor = arena.take(buffer)
        tensor.fill_(index)
        assert tensor.min() == tensor.max() == index
        arena.give(buffer)
    held = 8 * LARGE * 4
    assert resident().current - before < 1.5 * held
    assert ledger.owned() == held


def test_buffers_in_use_at_once_do_not_share(arena: Arena) -> None:
    sizes = [LARGE, 3 * LARGE, 2 * LARGE + 5]
    warm = arena.borrow(4 * LARGE, torch.float32, "gradients")
    arena.give_back(warm)
    tensors = [arena.borrow(size, torch.float32, "gradients") for size in sizes]
    for value, tensor in enumerate(tensors):
        tensor.fill_(value)
    assert [tensor.unique().tolist() for tensor in tensors] == [[0.0], [1.0], [2.0]]


def test_every_byte_is_in_one_category(arena: Arena, ledger: Ledger) -> None:
    first = arena.borrow(LARGE + 1, torch.float32, "gradients")
    assert ledger.current("gradients") == first.nbytes
    assert ledger.owned() == 5 * CHUNK
    arena.give_back(first)
    assert ledger.current("gradients") == 0
    assert ledger.current("idle") == 5 * CHUNK
    second = arena.borrow(LARGE, torch.bfloat16, "parameters")
    assert ledger.current("parameters") == second.nbytes
    assert ledger.owned() == 5 * CHUNK
    third = arena.borrow(3 * LARGE // 4, torch.float32, "gradients")
    assert ledger.owned() == 5 * CHUNK
    assert ledger.current("idle") == 5 * CHUNK - second.nbytes - third.nbytes


def test_a_borrowed_size_is_the_same_buffer_again(arena: Arena) -> None:
    first = arena.borrow(LARGE, torch.float32, "gradients")
    arena.give_back(first)
    assert arena.borrow(LARGE, torch.float32, "communication") is first


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory moves on Linux only")
def test_what_lies_idle_makes_room_for_a_large_gradient(arena: Arena, ledger: Ledger) -> None:
    held = 2 * MAPPED
    tensor = arena.borrow(held // 4, torch.float32, "gradients").fill_(1.0)
    arena.give_back(tensor)
    before = resident().current
    arena.make_room(MAPPED - 1)
    assert ledger.owned() == held
    arena.make_room(MAPPED)
    assert ledger.owned() == held - MAPPED
    assert before - resident().current > 0.9 * MAPPED
    again = arena.borrow(held // 4, torch.float32, "gradients").fill_(2.0)
    assert again.min() == again.max() == 2.0
    assert ledger.owned() == held


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory moves on Linux only")
def test_the_heap_makes_room_where_not_enough_lies_idle_and_when_that_is_needed_again(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    trimmed: list[int] = []
    monkeypatch.setattr(arena_module, "trim", trimmed.append)
    small = arena.borrow(LARGE, torch.float32, "gradients")
    arena.give_back(small)
    arena.make_room(MAPPED)
    assert trimmed == [MAPPED]
    large = arena.borrow(MAPPED // 4, torch.float32, "gradients")
    assert trimmed == [MAPPED], "nothing was given away that is missing now"
    arena.give_back(large)
    arena.make_room(MAPPED)
    arena.take(arena.reserve(LARGE, torch.float32, "gradients"))
    arena.take(arena.reserve(LARGE, torch.float32, "gradients"))
    assert trimmed == [MAPPED, 4 * CHUNK]
