"""Ranks of one host read each other's memory: one copy by the kernel, where a socket makes several.

Who has something for a peer lets it know the address (see ``board``), and the peer pulls it with
process_vm_readv(2) when it waits for it. What stays at one address for good is told once; its readers then
need nobody.

The system may forbid it (another container, a hardened kernel): each pair of ranks tries at start, and
pairs that can't read both ways use sockets.
"""

import ctypes
import os
import secrets
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

_PIECE = 1 << 18
"""Elements that are read and added at a time: they stay in the cache between the two."""

_CLOSED = 0
"""In the first of the shared words, once this rank offers nothing more."""

_shared_for_good: list[Any] = []
"""Peers may still look at the words of an engine that is gone: they stay until the process ends."""


class Source(NamedTuple):
    """Where something can be read."""

    rank: int
    address: int


class _Range(ctypes.Structure):
    """struct iovec."""

    _fields_ = [("address", ctypes.c_void_p), ("length", ctypes.c_size_t)]


class PeerMemory:
    """Which ranks can be read from here, and the reading."""

    def __init__(self, rank: int, world_size: int, group: dist.ProcessGroup | None, words: int) -> None:
        """``words`` is how many 64-bit integers each rank shares with its peers. Collective."""
        self._process_ids: list[int] = []
        self._readable: set[int] = set()
        self._read = _find_process_vm_readv()
        # The first is a number at random, which tells that it is really this rank that is read.
        self._shared = (ctypes.c_int64 * (1 + words))(1 + secrets.randbits(62))
        self._shared_at: list[int] = []
        if world_size > 1:
            _shared_for_good.append(self._shared)
            self._probe(rank, world_size, group)

    def __contains__(self, rank: int) -> bool:
        return rank in self._readable

    # Words that everyone may look at.

    def share(self, start: int, *words: int) -> None:
        """Let the peers see ``words`` from position ``start``."""
        self._shared[1 + start : 1 + start + len(words)] = list(words)

    def shared(self, position: int) -> int:
        """What this rank has let them see there, at first 0."""
        return self._shared[1 + position]

    def look(self, rank: int, start: int, count: int) -> list[int]:
        """``count`` words that ``rank`` shares. Raises OSError if that rank is gone."""
        seen = (ctypes.c_int64 * count)()
        place = self._shared_at[rank] + (1 + start) * ctypes.sizeof(ctypes.c_int64)
        self._copy(rank, place, ctypes.addressof(seen), ctypes.sizeof(seen))
        return list(seen)

    def check(self, rank: int) -> None:
        """Raise ConnectionError if ``rank`` has closed, OSError if it is gone."""
        if self.look(rank, -1, 1) == [_CLOSED]:
            raise ConnectionError(f"rank {rank} has given up")

    def close(self) -> None:
        """Let the peers know that nothing more comes."""
        self._shared[0] = _CLOSED

    # Tensors.

    def pull_sum(self, sources: list[Source], own: Tensor, total: Tensor) -> None:
        """Fill ``total`` with ``own`` plus what lies at each of the sources, of the same dtype and size.

        Summed in fp32 and rounded once. A piece at a time, so that memory is passed over once.
        """
        incoming = torch.empty(_PIECE, dtype=own.dtype)
        exact = torch.empty(_PIECE, dtype=torch.float32)
        offset = 0
        for ours, target in zip(own.split(_PIECE), total.split(_PIECE), strict=True):
            pieces = self._pull_each(sources, offset, incoming[: ours.numel()])
            if len(sources) == 1 and target.dtype == ours.dtype:
                # Of two, torch's own sum is one in fp32, rounded once.
                torch.add(ours, next(pieces), out=target)
            else:
                so_far = target if target.dtype == torch.float32 else exact[: ours.numel()]
                so_far.copy_(ours)
                for piece in pieces:
                    so_far.add_(piece)
                if so_far is not target:
                    target.copy_(so_far)
            offset += ours.nbytes

    def _pull_each(self, sources: list[Source], offset: int, target: Tensor) -> Iterator[Tensor]:
        """What lies ``offset`` bytes behind each of the sources, one after the other in ``target``."""
        for rank, address in sources:
            self.pull(rank, address + offset, target)
            yield target

    def pull(self, rank: int, address: int, target: Tensor) -> None:
        """Fill ``target`` from ``address`` of another rank. Raises OSError if that rank is gone."""
        self._copy(rank, address, target.data_ptr(), target.nbytes)

    def _copy(self, rank: int, there: int, here: int, length: int) -> None:
        assert self._read is not None
        done = 0
        while done < length:
            target, source = _Range(here + done, length - done), _Range(there + done, length - done)
            count = self._read(self._process_ids[rank], ctypes.byref(target), 1, ctypes.byref(source), 1, 0)
            if count <= 0:
                error = ctypes.get_errno()
                raise OSError(error, f"memory of rank {rank} can't be read: {os.strerror(error)}")
            done += count

    def _probe(self, rank: int, world_size: int, group: dist.ProcessGroup | None) -> None:
        """Every rank tries to read a random number from every other; both ways must succeed."""
        mine = torch.tensor([os.getpid(), ctypes.addressof(self._shared), self._shared[0]])
        told = [torch.empty_like(mine) for _ in range(world_size)]
        dist.all_gather(told, mine, group=group)
        self._process_ids = [int(other[0]) for other in told]
        self._shared_at = [int(other[1]) for other in told]
        succeeded = torch.zeros(world_size, dtype=torch.int64)
        for peer, other in enumerate(told):
            if peer == rank or self._read is None:
                continue
            with suppress(OSError):
                succeeded[peer] = self.look(peer, -1, 1) == [int(other[2])]
        table = [torch.empty_like(succeeded) for _ in range(world_size)]
        dist.all_gather(table, succeeded, group=group)
        self._readable = {peer for peer in range(world_size) if table[rank][peer] and table[peer][rank]}


def _find_process_vm_readv() -> Any:
    """The system call, or None where there is none."""
    if not sys.platform.startswith("linux"):
        return None
    read = ctypes.CDLL(None, use_errno=True).process_vm_readv
    read.restype = ctypes.c_ssize_t
    read.argtypes = [
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_ulong,
    ]
    return read
