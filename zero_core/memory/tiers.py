"""Values that lie on a tier, and how whoever computes with them gets at them.

    values = tiers.keep(tensor, torch.float32, "disk", "optimizer")
    loan = values.borrow(begin, end)        # starts to read
    lent = loan.wait()                      # in memory
    loan.give_back(changed=True)            # starts to write; what was lent is not read any more

The same calls do nothing but return a view where values stay in memory, so that nobody has to ask which
tier it is. Host tiers are of a GPU: on the CPU the device is the host, and nothing is kept twice.
"""

import mmap
from collections import deque
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from zero_core.config.offload import Tier
from zero_core.memory.arena import Arena
from zero_core.memory.disk import Extent, ScratchFile, Transfer
from zero_core.memory.ledger import Category, Ledger

WRITTEN_BEHIND = 64 << 20
"""Bytes that may still be on their way to the disk when the next are given back."""


class Waits(Protocol):
    def wait(self) -> None: ...


class Loan(Protocol):
    def wait(self) -> Tensor:
        """What was borrowed, 1-D, where the optimizer computes; the same tensor each time."""
        ...

    def give_back(self, changed: bool) -> None: ...


class Values(Protocol):
    """1-D values of one dtype."""

    @property
    def resident(self) -> Tensor | None:
        """Where the model computes, for good; None if they have to be brought."""
        ...

    @property
    def numel(self) -> int: ...

    def borrow(self, begin: int, end: int, *, read: bool = True) -> Loan:
        """Elements [begin, end); with arbitrary contents unless ``read``."""
        ...

    def bring(self, target: Tensor) -> Waits:
        """Start to fill ``target``, on the device, with all of them; complete once it was waited for."""
        ...


class InMemory:
    """On the device or the host."""

    def __init__(self, tensor: Tensor, tier: Tier) -> None:
        self._tensor = tensor
        self.resident = tensor if tier == "device" else None

    @property
    def numel(self) -> int:
        return self._tensor.numel()

    def borrow(self, begin: int, end: int, *, read: bool = True) -> Loan:
        return _View(self._tensor[begin:end])

    def bring(self, target: Tensor) -> Waits:
        return _brought(self._tensor, target)


class OnDisk:
    def __init__(self, extent: Extent, dtype: torch.dtype, category: Category, tiers: "Tiers") -> None:
        self.resident = None
        self._extent = extent
        self._dtype = dtype
        self._category = category
        self._tiers = tiers

    @property
    def numel(self) -> int:
        return self._extent.nbytes // self._dtype.itemsize

    def borrow(self, begin: int, end: int, *, read: bool = True) -> Loan:
        return _Lent(self, begin, end, read)

    def bring(self, target: Tensor) -> Waits:
        if target.device.type == "cpu":
            return self._extent.read(0, target)
        return _ThroughHost(self.borrow(0, self.numel), target)

    # For loans.

    def start_read(self, begin: int, end: int, read: bool) -> tuple[Tensor, Transfer]:
        tensor = self._tiers.host.borrow(end - begin, self._dtype, self._category)
        return tensor, self._extent.read(begin * self._dtype.itemsize, tensor) if read else Transfer([])

    def start_write(self, begin: int, tensor: Tensor) -> None:
        self._tiers.write_behind(self._extent.write(begin * self._dtype.itemsize, tensor), tensor)

    def drop(self, tensor: Tensor) -> None:
        self._tiers.host.give_back(tensor)


class Tiers:
    """Makes and keeps values; ``host`` is where those on disk pass through memory."""

    def __init__(
        self, device: torch.device, arena: Arena, ledger: Ledger, scratch_directory: str | None
    ) -> None:
        self._ledger = ledger
        self._directory = None if scratch_directory is None else Path(scratch_directory)
        self._file: ScratchFile | None = None
        self._behind: deque[tuple[Transfer, Tensor]] = deque()
        self.host = arena if device.type == "cpu" else Arena(torch.device("cpu"), ledger, "host")

    def hold(self, tensor: Tensor) -> Values:
        """Values that are in memory on account of somebody else."""
        return InMemory(tensor, "device")

    def keep(self, values: Tensor, dtype: torch.dtype, tier: Tier, category: Category) -> Values:
        """``values``, 1-D, as ``dtype`` on ``tier``; the tensor itself where it can stay what it is."""
        if tier == "disk":
            kept = self.reserve(values.numel(), dtype, category)
            loan = kept.borrow(0, values.numel(), read=False)
            loan.wait().copy_(values)
            loan.give_back(changed=True)
            return kept
        if tier == "host":
            tensor = _pinned(values.numel(), dtype).copy_(values)
        else:
            tensor = values.to(dtype, copy=_is_part(values))
        self._ledger.take(category, tensor.nbytes, tier)
        return InMemory(tensor, tier)

    def reserve(self, numel: int, dtype: torch.dtype, category: Category) -> Values:
        """Room on the disk. Raises ScratchFull if there is none."""
        if self._file is None:
            self._file = ScratchFile(self._directory)
        nbytes = numel * dtype.itemsize
        self._ledger.take(category, nbytes, "disk")
        return OnDisk(self._file.reserve(nbytes), dtype, category, self)

    def write_behind(self, write: Transfer, source: Tensor) -> None:
        """Give ``source`` back to the arena when it was written; wait if too much is on its way."""
        self._behind.append((write, source))
        while sum(tensor.nbytes for _, tensor in self._behind) > WRITTEN_BEHIND:
            self._finish_oldest()

    def settle(self) -> None:
        """All writes have ended."""
        while self._behind:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        write, source = self._behind.popleft()
        write.wait()
        self.host.give_back(source)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class _View:
    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def wait(self) -> Tensor:
        return self._tensor

    def give_back(self, changed: bool) -> None:
        pass


class _Lent:
    """From the disk, in a buffer of its own."""

    def __init__(self, values: OnDisk, begin: int, end: int, read: bool) -> None:
        self._values = values
        self._begin = begin
        self._tensor, self._read = values.start_read(begin, end, read)

    def wait(self) -> Tensor:
        self._read.wait()
        return self._tensor

    def give_back(self, changed: bool) -> None:
        self._read.wait()
        if changed:
            self._values.start_write(self._begin, self._tensor)
        else:
            self._values.drop(self._tensor)


class _ThroughHost:
    """From the disk to a GPU."""

    def __init__(self, loan: Loan, target: Tensor) -> None:
        self._loan = loan
        self._target = target

    def wait(self) -> None:
        self._target.copy_(self._loan.wait())
        self._loan.give_back(changed=False)


class _Arrival:
    """A copy on a stream of its own: what is started after ``wait`` sees it."""

    def __init__(self, source: Tensor, target: Tensor) -> None:
        stream = _stream(target.device)
        # The memory of ``target`` may still be in use by what was started before.
        stream.wait_stream(torch.cuda.current_stream(target.device))
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            self._event = stream.record_event()

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)


_streams: dict[torch.device, torch.cuda.Stream] = {}


def _stream(device: torch.device) -> torch.cuda.Stream:
    """The one that brings values to ``device``."""
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    return _streams[device]


def _brought(source: Tensor, target: Tensor) -> Waits:
    if target.is_cuda:
        return _Arrival(source, target)
    target.copy_(source)
    return Transfer([])


def _pinned(numel: int, dtype: torch.dtype) -> Tensor:
    """Host memory that a GPU reads at full speed, of exactly this size.

    torch's own pinned allocations are rounded up to powers of two: 129.5 MiB become 256. Pages that were
    mapped for this alone are registered with the driver instead.
    """
    nbytes = max(1, numel * dtype.itemsize)
    mapping = mmap.mmap(-1, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)
    tensor = torch.frombuffer(mapping, dtype=dtype, count=numel)
    if torch.cuda.is_available():
        runtime = torch.cuda.cudart()
        torch.cuda.check_error(runtime.cudaHostRegister(tensor.data_ptr(), len(mapping), 0))
    return tensor


def _is_part(values: Tensor) -> bool:
    """To keep these as they are would keep more memory than theirs."""
    return values.untyped_storage().nbytes() > values.nbytes
