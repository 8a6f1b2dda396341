"""The sum of squares of a large buffer, exact enough that how it was cut can't be seen in it."""

import torch
from torch import Tensor

CHUNK = 512
"""Elements summed in fp32: a kernel that sums millions so is wrong by 1e-3, with these few by 1e-7."""


def square_sum(buffer: Tensor) -> Tensor:
    """Of a 1-D ``buffer``, as a 0-dim fp64 tensor on its device: chunks in fp32, their sum in fp64."""
    whole = buffer.numel() // CHUNK * CHUNK
    chunks = torch.linalg.vector_norm(buffer[:whole].view(-1, CHUNK), dim=1, dtype=torch.float32)
    rest = torch.linalg.vector_norm(buffer[whole:], dtype=torch.float32)
    return chunks.double().square().sum() + rest.double().square()
