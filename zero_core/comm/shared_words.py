"""Words that the ranks of one host show each other, in memory that all of them map.

They outlive their rank: what it said last can still be read when it is gone. Each map holds a file
descriptor until its engine is collected: one for each rank of the host.
"""

import ctypes
import mmap
import os

WORD = 8
"""Bytes: an int64 each."""


class SharedWords:
    """This rank's words and, once they are mapped, those of its peers. All are 0 at first."""

    def __init__(self, count: int) -> None:
        self._size = WORD * count
        self._file = _make_file(self._size)
        # Without a file nobody else can map them.
        self.mine = memoryview(mmap.mmap(self._file, self._size)).cast("q")
        self._theirs: dict[int, memoryview] = {}

    @property
    def file(self) -> int:
        """The descriptor by which peers find this rank's words; -1 if they can't, or have done so."""
        return self._file

    @property
    def address(self) -> int:
        """Of the first of this rank's words, in its own process."""
        return ctypes.addressof(ctypes.c_int64.from_buffer(self.mine))

    def of(self, rank: int) -> memoryview:
        """What ``rank`` shows: read-only."""
        return self._theirs[rank]

    def map(self, rank: int, process_id: int, file: int) -> None:
        """Look at the words of ``rank`` from now on. Raises OSError or ValueError where it can't.

        Whether the process that has this number here is that rank is for the caller to see.
        """
        descriptor = os.open(f"/proc/{process_id}/fd/{file}", os.O_RDONLY | os.O_NONBLOCK)
        try:
            mapped = mmap.mmap(descriptor, self._size, prot=mmap.PROT_READ)
        finally:
            os.close(descriptor)
        self._theirs[rank] = memoryview(mapped).cast("q")

    def close_file(self) -> None:
        """Once every peer has mapped it."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _make_file(size: int) -> int:
    """A file in memory, or -1 where there is none."""
    try:
        file = os.memfd_create("zero_core")
    except (AttributeError, OSError):
        return -1
    os.ftruncate(file, size)
    return file
