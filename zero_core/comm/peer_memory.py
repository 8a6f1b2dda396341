"""Ranks of one host read each other's memory: one copy by the kernel, where a socket makes several.

Who has something for a peer lets it know the address (see ``board``), and the peer pulls it with
process_vm_readv(2) when it waits for it. What stays at one address for good is told once; its readers then
need nobody. Words by which ranks tell each other more than once lie in memory that all of them map (see
``shared_words``).

The system may forbid either (another container, a hardened kernel): each pair of ranks tries both at start,
and pairs that can't read both ways use sockets.
"""

import ctypes
import os
import secrets
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import permutations
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from zero_core.comm.shared_words import WORD, SharedWords
from zero_core.errors import PeerGone, PeerSilent

_PIECE = 1 << 18
"""Elements that are read and added at a time: they stay in the cache between the two."""

_CLOSED = 0
"""In the first of the shared words, once this rank offers nothing more."""

_SHORTEST_PAUSE = 20e-6
_LONGEST_PAUSE = 500e-6
"""Seconds between two looks, twice as long each time: a rank that waits leaves its core to others."""


class Source(NamedTuple):
    """Where something can be read."""

    rank: int
    address: int


class _Peer(NamedTuple):
    """What a rank tells the others of itself at start."""

    process_id: int
    words_at: int
    """Address of its words, in its own process."""
    file: int
    """Descriptor of theirs, in its own process."""
    first_word: int


class _Range(ctypes.Structure):
    """struct iovec."""

    _fields_ = [("address", ctypes.c_void_p), ("length", ctypes.c_size_t)]


class PeerMemory:
    """Which ranks can be read from here, the reading, and the waiting for what they show."""

    def __init__(
        self, rank: int, world_size: int, group: dist.ProcessGroup | None, words: int, timeout: timedelta
    ) -> None:
        """``words`` is how many 64-bit integers each rank shows its peers. Collective."""
        self.rank = rank
        self._timeout = timeout.total_seconds()
        self._process_id = os.getpid()
        self._ranks: list[_Peer] = []
        self._connected: set[tuple[int, int]] = set()
        """Pairs of ranks that read each other, in both orders."""
        self._read = _find_process_vm_readv()
        self._words = SharedWords(1 + words)
        # The first is a number at random, which tells that it is really this rank that is read.
        self._words.mine[0] = 1 + secrets.randbits(62)
        try:
            if world_size > 1:
                self._probe(world_size, group)
        finally:
            self._words.close_file()

    def __contains__(self, rank: int) -> bool:
        return (self.rank, rank) in self._connected

    def connects(self, ranks: tuple[int, ...]) -> bool:
        """All of ``ranks`` read each other, which all of them know."""
        return all(pair in self._connected for pair in permutations(ranks, 2))

    # Words that everyone may look at.

    def share(self, start: int, words: "array[int]") -> None:
        """Let the peers see ``words`` from position ``start``."""
        self._words.mine[1 + start : 1 + start + len(words)] = memoryview(words)

    def shared(self, position: int) -> int:
        """What this rank has let them see there, at first 0."""
        return self._words.mine[1 + position]

    def look(self, rank: int, start: int, count: int) -> memoryview:
        """``count`` words that ``rank`` shares."""
        return self._words.of(rank)[1 + start : 1 + start + count]

    def wait(self, rank: int, true: Callable[[], bool]) -> None:
        """Return when something is true of what ``rank`` shares.

        Raises PeerGone if that rank gives up or dies before, PeerSilent after the time-out.
        """
        deadline, pause = time.monotonic() + self._timeout, _SHORTEST_PAUSE
        while not true():
            try:
                self._check(rank)
            except PeerGone:
                # It may have said it and left since.
                if true():
                    return
                raise
            if time.monotonic() > deadline:
                raise PeerSilent(f"timed out after {self._timeout:g} s: rank {rank} does not go on")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _check(self, rank: int) -> None:
        """Raise PeerGone if ``rank`` has closed or ended."""
        words = self._words.of(rank)
        # Another process may have its number by now.
        another = words[0] != _CLOSED and self._first_word(rank) != self._ranks[rank].first_word
        # Asked last: it may have closed since the first look, and its word is another then, too.
        if words[0] == _CLOSED:
            raise PeerGone(f"rank {rank} has given up")
        if another:
            raise PeerGone(f"rank {rank} has ended")

    def _first_word(self, rank: int) -> int:
        """Read from the process itself."""
        seen = ctypes.c_int64()
        self._copy(rank, self._ranks[rank].words_at, ctypes.addressof(seen), WORD)
        return seen.value

    def close(self) -> None:
        """Let the peers know that nothing more comes."""
        # A forked child maps the same words.
        if os.getpid() == self._process_id:
            self._words.mine[0] = _CLOSED

    # Tensors.

    def pull_sum(self, sources: list[Source], own: Tensor, total: Tensor) -> None:
        """Fill ``total`` with ``own`` plus what lies at each of the sources, of the same dtype and size.

        Summed in fp32 and rounded once. A piece at a time, so that memory is passed over once.
        """
        incoming = torch.empty(_PIECE, dtype=own.dtype)
        exact = torch.empty(_PIECE, dtype=torch.float32)
        offset = 0
        for ours, target in zip(own.split(_PIECE), total.split(_PIECE), strict=True):
            theirs = incoming[: ours.numel()]
            if len(sources) == 1 and target.dtype == ours.dtype:
                if target.data_ptr() != ours.data_ptr():
                    # The kernel fills memory without fetching it first, which torch's sum would do.
                    theirs = target
                self.pull(sources[0].rank, sources[0].address + offset, theirs)
                # Of two, torch's own sum is one in fp32, rounded once.
                torch.add(ours, theirs, out=target)
            else:
                so_far = target if target.dtype == torch.float32 else exact[: ours.numel()]
                so_far.copy_(ours)
                for rank, address in sources:
                    self.pull(rank, address + offset, theirs)
                    so_far.add_(theirs)
                if so_far is not target:
                    target.copy_(so_far)
            offset += ours.nbytes

    def pull(self, rank: int, address: int, target: Tensor) -> None:
        """Fill ``target`` from ``address`` of another rank. Raises PeerGone if that rank has ended."""
        self._copy(rank, address, target.data_ptr(), target.nbytes)

    def _copy(self, rank: int, there: int, here: int, length: int) -> None:
        assert self._read is not None
        process_id, done = self._ranks[rank].process_id, 0
        while done < length:
            target, source = _Range(here + done, length - done), _Range(there + done, length - done)
            count = self._read(process_id, ctypes.byref(target), 1, ctypes.byref(source), 1, 0)
            if count <= 0:
                error = ctypes.get_errno()
                raise PeerGone(f"memory of rank {rank} can't be read: {os.strerror(error)}")
            done += count

    def _probe(self, world_size: int, group: dist.ProcessGroup | None) -> None:
        """Every rank tries to read every other; both ways must succeed."""
        mine = _Peer(self._process_id, self._words.address, self._words.file, self._words.mine[0])
        self._ranks = [_Peer(*told) for told in _everyones(mine, world_size, group)]
        reached = [self._reach(rank, peer) for rank, peer in enumerate(self._ranks)]
        table = _everyones(reached, world_size, group)
        pairs = permutations(range(world_size), 2)
        self._connected = {(a, b) for a, b in pairs if table[a][b] and table[b][a]}

    def _reach(self, rank: int, peer: _Peer) -> bool:
        """Can its memory be read, and its words be mapped?"""
        if rank == self.rank or self._read is None:
            return False
        with suppress(OSError, PeerGone, ValueError):
            if self._first_word(rank) == peer.first_word:
                self._words.map(rank, peer.process_id, peer.file)
                return self._words.of(rank)[0] == peer.first_word
        return False


def _everyones(mine: Sequence[int], world_size: int, group: dist.ProcessGroup | None) -> list[list[int]]:
    told = [torch.empty(len(mine), dtype=torch.int64) for _ in range(world_size)]
    dist.all_gather(told, torch.tensor(mine, dtype=torch.int64), group=group)
    return [other.tolist() for other in told]


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
