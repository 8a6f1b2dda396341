"""A scratch file without a name: what the disk tier keeps, written and read back beside the computation.

- The file is unlinked from the start, so that nothing is left behind, whatever ends the process.
- Space is reserved before it is used: a full disk is told when the engine is built, not in the middle of a
  step.
- Reads and writes go past the page cache where the file system allows it (O_DIRECT): cached, the file would
  come back as memory, of which the tier was to need none. Direct transfers want addresses, offsets and
  lengths in multiples of ``ALIGNMENT``; a tensor that lies otherwise goes through a buffer that doesn't.
- Every block of what is written is hashed, and checked when it is read back.

The threads do nothing but system calls, hashes and copies, all of which leave the interpreter to others.
"""

import ctypes
import errno
import mmap
import os
import tempfile
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import xxhash
from torch import Tensor

from zero_core.errors import EngineError, ScratchDamaged, ScratchFailed, ScratchFull
from zero_core.memory.tensor_bytes import bytes_of

ALIGNMENT = 4096
"""Bytes: what direct transfers are multiples of on the usual file systems."""

BLOCK = 1 << 20
"""Bytes that are hashed together. A read begins at a multiple of it in its extent."""

_AT_ONCE = 4 * BLOCK
"""Bytes of one system call."""

_THREADS = 4
"""System calls under way: with fewer a fast disk idles."""


class Transfer:
    """A read or a write under way; ``wait`` returns when it has ended, and raises what went wrong."""

    def __init__(self, parts: list[Future[None]]) -> None:
        self._parts = parts

    @property
    def done(self) -> bool:
        return all(part.done() for part in self._parts)

    def wait(self) -> None:
        parts, self._parts = self._parts, []
        # All have ended before any error is raised: none may still use the tensor.
        errors = [error for part in parts if (error := part.exception()) is not None]
        if errors:
            raise errors[0]


class ScratchFile:
    def __init__(self, directory: Path | None) -> None:
        """``directory`` is made if need be; None is the system's temporary directory."""
        self.directory = Path(tempfile.gettempdir()) if directory is None else directory
        self.end = 0
        """Bytes that are reserved."""
        with _told("can't be opened", self.directory):
            self.directory.mkdir(parents=True, exist_ok=True)
            self._descriptor, self.direct = _open(self.directory)
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="scratch")
        self._bounce = threading.local()
        self._close = weakref.finalize(self, _close, self._threads, self._descriptor)

    def reserve(self, nbytes: int) -> "Extent":
        """Room for ``nbytes`` bytes. Raises ScratchFull if there is none."""
        offset, self.end = self.end, self.end + _round_up(nbytes)
        if nbytes:
            with _told(f"has no room for {self.end / 1e9:.2f} GB", self.directory):
                os.posix_fallocate(self._descriptor, offset, _round_up(nbytes))
        return Extent(self, offset, nbytes)

    def submit(self, work: Callable[[], None]) -> Future[None]:
        return self._threads.submit(work)

    def close(self) -> None:
        """Give file and threads up."""
        self._close()

    # In the threads.

    def read(self, offset: int, target: memoryview) -> None:
        """Fill ``target`` from ``offset``, a multiple of ``ALIGNMENT``."""
        with _told("can't be read", self.directory):
            self._transfer(os.preadv, offset, self._landing(target))
        if not self._is_aligned(target):
            _copy(target, self._landing(target), target.nbytes)

    def write(self, offset: int, source: memoryview) -> None:
        if not self._is_aligned(source):
            _copy(self._landing(source), source, source.nbytes)
        with _told("can't be written", self.directory):
            self._transfer(os.pwritev, offset, self._landing(source))

    def _landing(self, memory: memoryview) -> memoryview:
        """``memory`` itself, or this thread's own buffer in its place."""
        if self._is_aligned(memory):
            return memory
        if not hasattr(self._bounce, "buffer"):
            self._bounce.buffer = memoryview(mmap.mmap(-1, _AT_ONCE))
        buffer: memoryview = self._bounce.buffer
        return buffer[: _round_up(memory.nbytes)]

    def _is_aligned(self, memory: memoryview) -> bool:
        return not self.direct or (_address(memory) % ALIGNMENT == 0 and memory.nbytes % ALIGNMENT == 0)

    def _transfer(self, call: Callable[..., int], offset: int, memory: memoryview) -> None:
        done = 0
        while done < memory.nbytes:
            count = call(self._descriptor, [memory[done:]], offset + done)
            if count == 0:
                raise OSError(errno.EIO, "the file ends too early")
            # What is left after a short transfer begins at a multiple of ALIGNMENT again.
            done += count if count == memory.nbytes - done else count // ALIGNMENT * ALIGNMENT


class Extent:
    """Some bytes of a scratch file, with the hash of each block that was written.

    A read sees what was written before it. What is being read must not be written yet.
    """

    def __init__(self, file: ScratchFile, offset: int, nbytes: int) -> None:
        self._file = file
        self._offset = offset
        self.nbytes = nbytes
        self._hashes: list[int | None] = [None] * -(-nbytes // BLOCK)
        self._writes: list[Transfer] = []

    def read(self, begin: int, target: Tensor) -> Transfer:
        """Start to fill ``target`` (contiguous, on the CPU) with the bytes from ``begin`` on."""
        for write in self._writes:
            write.wait()
        self._writes = []
        return self._start(begin, target, self._read_part)

    def write(self, begin: int, source: Tensor) -> Transfer:
        """Start to write ``source``, which must stay as it is until the transfer has ended."""
        write = self._start(begin, source, self._write_part)
        self._writes = [earlier for earlier in self._writes if not earlier.done] + [write]
        return write

    def _start(self, begin: int, tensor: Tensor, part: Callable[[int, memoryview], None]) -> Transfer:
        assert tensor.is_contiguous()
        assert begin % BLOCK == 0
        assert begin + tensor.nbytes <= self.nbytes, (begin, tensor.nbytes, self.nbytes)
        whole_blocks = tensor.nbytes % BLOCK == 0 or begin + tensor.nbytes == self.nbytes
        assert whole_blocks, "a block is transferred whole"
        if not tensor.nbytes:
            return Transfer([])
        memory = bytes_of(tensor)
        starts = range(0, memory.nbytes, _AT_ONCE)
        return Transfer(
            [self._file.submit(partial(part, begin + at, memory[at : at + _AT_ONCE])) for at in starts]
        )

    def _read_part(self, begin: int, target: memoryview) -> None:
        self._file.read(self._offset + begin, target)
        for number, block in _blocks(begin, target):
            if xxhash.xxh3_64_intdigest(block) != self._hashes[number]:
                raise ScratchDamaged(
                    f"the scratch file in {self._file.directory} gave back other bytes than were written "
                    f"({block.nbytes} at {self._offset + begin}): its disk can't be trusted; start again on "
                    "another, from the last checkpoint"
                )

    def _write_part(self, begin: int, source: memoryview) -> None:
        for number, block in _blocks(begin, source):
            self._hashes[number] = xxhash.xxh3_64_intdigest(block)
        self._file.write(self._offset + begin, source)


def _blocks(begin: int, memory: memoryview) -> list[tuple[int, memoryview]]:
    """With their numbers in the extent."""
    return [((begin + at) // BLOCK, memory[at : at + BLOCK]) for at in range(0, memory.nbytes, BLOCK)]


def _open(directory: Path) -> tuple[int, bool]:
    """A new file without a name, and whether it takes direct transfers."""
    for direct in (os.O_DIRECT, 0) if hasattr(os, "O_DIRECT") else (0,):
        try:
            descriptor = _unnamed(directory, direct)
        except OSError as error:
            if direct and error.errno == errno.EINVAL:
                continue
            raise
        if not direct or _takes_direct(descriptor):
            return descriptor, bool(direct)
        os.close(descriptor)
    raise AssertionError("a file without O_DIRECT was opened or the error raised")


def _unnamed(directory: Path, flags: int) -> int:
    if hasattr(os, "O_TMPFILE"):
        # Not every file system has files that never had a name.
        with suppress(OSError):
            return os.open(directory, os.O_TMPFILE | os.O_RDWR | flags, 0o600)
    named, path = tempfile.mkstemp(dir=directory, prefix=".scratch-")
    try:
        return os.open(path, os.O_RDWR | flags)
    finally:
        os.unlink(path)
        os.close(named)


def _takes_direct(descriptor: int) -> bool:
    """Some file systems open the file and refuse the transfer."""
    with mmap.mmap(-1, ALIGNMENT) as page:
        try:
            os.pwrite(descriptor, page, 0)
        except OSError as error:
            if error.errno == errno.EINVAL:
                return False
            raise
    return True


class _told:
    """A block whose OSError becomes one of the engine's own."""

    def __init__(self, what: str, directory: Path) -> None:
        self._what = what
        self._directory = directory

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, OSError):
            full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
            told: type[EngineError] = ScratchFull if full else ScratchFailed
            way_out = "free space there, or put scratch_directory on another disk"
            raise told(
                f"the scratch file in {self._directory} {self._what}: {error.strerror}; {way_out}"
            ) from error


def _address(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _copy(target: memoryview, source: memoryview, nbytes: int) -> None:
    ctypes.memmove(_address(target), _address(source), nbytes)


def _round_up(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _close(threads: ThreadPoolExecutor, descriptor: int) -> None:
    threads.shutdown(wait=True, cancel_futures=True)
    os.close(descriptor)
