"""Ranks of one host read each other's memory: one copy by the kernel, where a socket makes several.

Who has something for a peer tells it the address, and the peer pulls it with process_vm_readv(2) when it
waits for it. What is told are a few bytes over gloo, so ranks are as much in step as with sockets. What
stays at one address for good is told once; its readers then need nobody.

The system may forbid it (another container, a hardened kernel): each pair of ranks tries at start, and
pairs that can't read both ways use sockets.
"""

import ctypes
import os
import secrets
import sys
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_PIECE = 1 << 18
"""Elements that are read and added at a time: they stay in the cache between the two."""

_ACKNOWLEDGED = 1
"""Tag of the messages that say that a peer has read."""


class _Range(ctypes.Structure):
    """struct iovec."""

    _fields_ = [("address", ctypes.c_void_p), ("length", ctypes.c_size_t)]


class PeerMemory:
    """Which ranks can be read from here, and the reading."""

    def __init__(self, rank: int, world_size: int, group: dist.ProcessGroup | None) -> None:
        self._process_ids: list[int] = []
        self._readable: set[int] = set()
        self._read = _find_process_vm_readv()
        if world_size > 1:
            self._probe(rank, world_size, group)

    def __contains__(self, rank: int) -> bool:
        return rank in self._readable

    def pull_sum(self, sources: list[tuple[int, int]], own: Tensor, total: Tensor) -> None:
        """Fill ``total`` with ``own`` plus what lies at each rank's address, of the same dtype and size.

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

    def _pull_each(self, sources: list[tuple[int, int]], offset: int, target: Tensor) -> Iterator[Tensor]:
        """What lies ``offset`` bytes behind each rank's address, one after the other in ``target``."""
        for rank, address in sources:
            self.pull(rank, address + offset, target)
            yield target

    def pull(self, rank: int, address: int, target: Tensor) -> None:
        """Fill ``target`` from ``address`` of another rank. Raises OSError if that rank is gone."""
        assert self._read is not None
        done = 0
        while done < target.nbytes:
            left = target.nbytes - done
            here = _Range(target.data_ptr() + done, left)
            there = _Range(address + done, left)
            count = self._read(self._process_ids[rank], ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
            if count <= 0:
                error = ctypes.get_errno()
                raise OSError(error, f"memory of rank {rank} can't be read: {os.strerror(error)}")
            done += count

    def _probe(self, rank: int, world_size: int, group: dist.ProcessGroup | None) -> None:
        """Every rank tries to read a random number from every other; both ways must succeed."""
        nonce = torch.tensor([secrets.randbits(62)], dtype=torch.int64)
        mine = torch.tensor([os.getpid(), nonce.data_ptr(), nonce.item()], dtype=torch.int64)
        told = [torch.empty_like(mine) for _ in range(world_size)]
        dist.all_gather(told, mine, group=group)
        self._process_ids = [int(other[0]) for other in told]
        succeeded = torch.zeros(world_size, dtype=torch.int64)
        for peer, (_, address, expected) in enumerate(other.tolist() for other in told):
            if peer == rank or self._read is None:
                continue
            seen = torch.zeros(1, dtype=torch.int64)
            try:
                self.pull(peer, address, seen)
            except OSError:
                continue
            succeeded[peer] = int(seen.item() == expected)
        table = [torch.empty_like(succeeded) for _ in range(world_size)]
        # Also a barrier: until here every nonce is kept.
        dist.all_gather(table, succeeded, group=group)
        self._readable = {peer for peer in range(world_size) if table[rank][peer] and table[peer][rank]}


class Offers:
    """What this rank offers to peers on one group, in the one order that all its ranks keep to.

    With each offer goes how many of the peers' have been read here. So nobody is told separately that
    memory is free again, and no rank waits until another has read.
    """

    def __init__(self) -> None:
        self.read = 0
        """Offers of the peers that this rank has read, in order."""
        self._made = 0
        self._read_by: dict[int, int] = {}
        """How many of this rank's offers each peer has read, as far as is known."""
        self._kept: deque[tuple[int, Tensor, Callable[[], None]]] = deque()
        self.open = False
        """Something was kept since everything was released: the same on all ranks."""

    def keep(self, offered: Tensor, release: Callable[[], None] | None) -> None:
        """Make the next offer; ``release`` is called once all peers have read it."""
        if release is not None:
            self.open = True
            self._kept.append((self._made, offered, release))
        self._made += 1

    def learn(self, rank: int, read: int) -> None:
        self._read_by[rank] = read

    def release_read(self) -> None:
        """Release what all peers are known to have read."""
        while self._kept and self._kept[0][0] < min(self._read_by.values()):
            self._release_oldest()

    def release_all(self) -> None:
        """All peers have read everything."""
        while self._kept:
            self._release_oldest()
        self.open = False

    def _release_oldest(self) -> None:
        _, _, release = self._kept.popleft()
        release()


Combine = Callable[[list[tuple[int, int]]], None]
"""Reads what several ranks offer: a rank and an address each."""


class Pull:
    """One collective's reads from peers of this host, as ``torch.distributed`` hands out work."""

    def __init__(
        self,
        memory: PeerMemory,
        group: dist.ProcessGroup | None,
        stable: bool,
        *,
        combine: Combine | None = None,
        offers: Offers | None = None,
    ) -> None:
        """Unless what it offers is ``stable`` or one of ``offers``, it lasts until the peers have read."""
        self._memory = memory
        self._group = group
        self._waits = not stable and offers is None
        self._combine = combine
        self._offers = offers
        self._reads: list[tuple[int, int, Tensor]] = []
        self._exchanges: list[_Exchange] = []

    def read(self, rank: int, address: int, incoming: Tensor) -> None:
        """On ``wait`` fill ``incoming`` from ``address`` of ``rank``, which knows nothing of it."""
        self._reads.append((rank, address, incoming))

    def add(self, rank: int, outgoing: Tensor, incoming: Tensor | None = None) -> None:
        """Offer ``outgoing`` to ``rank``; on ``wait`` fill ``incoming`` with what it offers.

        Without ``incoming`` it is for ``combine``, which is called when all is there to be read, so that
        the result needs no memory before.
        """
        read = self._offers.read if self._offers is not None else 0
        said, theirs = torch.tensor([outgoing.data_ptr(), read]), torch.empty(2, dtype=torch.int64)
        told = dist.irecv(theirs, src=rank, group=self._group)
        sent = dist.isend(said, dst=rank, group=self._group)
        self._exchanges.append(_Exchange(rank, outgoing, incoming, told, theirs, sent, said))

    def wait(self) -> None:
        """Read everything, and await that every peer has read from here where nothing else tells."""
        for rank, address, incoming in self._reads:
            self._memory.pull(rank, address, incoming)
        self._reads = []
        for exchange in self._exchanges:
            exchange.told.wait()
            if self._offers is not None:
                self._offers.learn(exchange.rank, int(exchange.theirs[1]))
        if self._offers is not None:
            # Before what is read needs memory.
            self._offers.release_read()
        acknowledgements: list[tuple[Any, Tensor]] = []
        sources = [(exchange.rank, int(exchange.theirs[0])) for exchange in self._exchanges]
        if self._combine is not None and sources:
            self._combine(sources)
        for exchange, (rank, address) in zip(self._exchanges, sources, strict=True):
            if exchange.incoming is not None:
                self._memory.pull(rank, address, exchange.incoming)
            if self._waits:
                acknowledgements += self._acknowledge(rank)
        if self._offers is not None and self._exchanges:
            self._offers.read += 1
        for work, _ in acknowledgements:
            work.wait()
        for exchange in self._exchanges:
            exchange.sent.wait()
        self._exchanges = []

    def _acknowledge(self, rank: int) -> list[tuple[Any, Tensor]]:
        """Tell ``rank`` that its offer was read, and await the same of it; with the tensors in use."""
        mine, theirs = torch.zeros(1, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8)
        return [
            (dist.isend(mine, dst=rank, group=self._group, tag=_ACKNOWLEDGED), mine),
            (dist.irecv(theirs, src=rank, group=self._group, tag=_ACKNOWLEDGED), theirs),
        ]


@dataclass(frozen=True)
class _Exchange:
    """With one peer; it keeps alive what the peer reads and what gloo sends."""

    rank: int
    outgoing: Tensor
    incoming: Tensor | None
    told: Any
    theirs: Tensor
    sent: Any
    said: Tensor


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
