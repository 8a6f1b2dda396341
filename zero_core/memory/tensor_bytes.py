"""The bytes of a tensor on the CPU."""

import ctypes

from torch import Tensor


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU, to read from or to fill; it keeps the tensor alive.

    Not by way of numpy, which would keep torch from ever resizing the storage again.
    """
    assert tensor.is_contiguous()
    if not tensor.nbytes:
        return memoryview(b"")
    region = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    region.tensor = tensor  # type: ignore[attr-defined]
    return memoryview(region).cast("B")
