"""The heap, where torch's CPU allocator gets tensors: giving memory back before it is needed elsewhere.

glibc keeps what a backward freed of activations and gradients. Smaller tensors to come use it; a large one
is mapped anew and comes on top.
"""

import ctypes
import mmap
import sys

from torch import Tensor

MAPPED = 32 << 20
"""Bytes from which glibc maps every allocation (DEFAULT_MMAP_THRESHOLD_MAX)."""

# malloc.h
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


class _Statistics(ctypes.Structure):
    """struct mallinfo2."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks",
            "keepcost",
        )
    ]  # fmt: skip


_libc = ctypes.CDLL(None, use_errno=True)
_known = hasattr(_libc, "mallinfo2") and hasattr(_libc, "malloc_trim")
if _known:
    _libc.mallinfo2.restype = _Statistics
    _libc.malloc_trim.argtypes = [ctypes.c_size_t]


def keep_what_is_freed() -> None:
    """From now on glibc keeps what is freed until ``trim``, and maps only what is large.

    By its own rules it trims the heap's end again and again during a backward: a page fault for every 4 KiB
    that comes back, a fifth of the step (docs/decisions/0010).
    """
    if _known:
        _libc.mallopt(_M_MMAP_THRESHOLD, MAPPED)
        _libc.mallopt(_M_TRIM_THRESHOLD, -1)


def trim(nbytes: int) -> None:
    """Give the system what lies free, if it is at least ``nbytes``. Does nothing where there is no glibc."""
    if _known and _libc.mallinfo2().fordblks >= nbytes:
        _libc.malloc_trim(0)


def drop(part: Tensor) -> None:
    """Give the pages of a contiguous CPU tensor back to the system; what it holds becomes arbitrary."""
    first = -(-part.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (part.data_ptr() + part.nbytes - first) // mmap.PAGESIZE * mmap.PAGESIZE
    if length > 0:
        drop_pages(first, length)


def drop_pages(address: int, length: int) -> None:
    """The same of whole pages."""
    if not sys.platform.startswith("linux"):
        return
    if _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(length), mmap.MADV_DONTNEED):
        raise OSError(ctypes.get_errno(), "madvise")
