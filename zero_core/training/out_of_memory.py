"""Telling an out-of-memory from other errors, and where in the run it came."""

import errno

import torch

_SIGNS = (
    "CUDA out of memory",
    "can't allocate memory",
    "not enough memory: you tried to allocate",
    "Cannot allocate memory",
    "bad_alloc",
    "bad allocation",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "could not create a memory object",
)
"""Of errors that have no type of their own: torch's allocators, C++, cuBLAS and oneDNN."""


class OutOfMemory(RuntimeError):
    """This rank found no memory for what it did. The message says when: ``in step 12``."""

    def __init__(self, step: int, when: str) -> None:
        super().__init__(when)
        self.step = step


def is_out_of_memory(error: BaseException) -> bool:
    """Of the device or of the host. A full disk is something else."""
    if isinstance(error, OutOfMemory | torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)
