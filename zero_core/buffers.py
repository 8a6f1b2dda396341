"""Scratch buffers that are used again: on CPU a fresh large allocation pays a page fault every 4 KiB."""

import torch
from torch import Tensor

from zero_core.memory import Category, Ledger


class BufferPool:
    """Hands out flat buffers by size and dtype. An idle one is accounted as ``communication``."""

    def __init__(self, device: torch.device, ledger: Ledger) -> None:
        self._device = device
        self._ledger = ledger
        self._idle: dict[tuple[int, torch.dtype], list[Tensor]] = {}

    def take(self, numel: int, dtype: torch.dtype, category: Category) -> Tensor:
        """A buffer of ``numel`` elements with arbitrary contents."""
        idle = self._idle.get((numel, dtype))
        if idle:
            buffer = idle.pop()
            self._ledger.give("communication", buffer.nbytes)
        else:
            buffer = torch.empty(numel, dtype=dtype, device=self._device)
        self._ledger.take(category, buffer.nbytes)
        return buffer

    def give(self, buffer: Tensor, category: Category) -> None:
        """Take back a buffer that ``take`` handed out for ``category``."""
        self._ledger.give(category, buffer.nbytes)
        self._ledger.take("communication", buffer.nbytes)
        self._idle.setdefault((buffer.numel(), buffer.dtype), []).append(buffer)
