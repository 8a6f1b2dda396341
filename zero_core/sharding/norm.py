"""The sum of squares of large buffers, exact enough that how it was cut can't be seen in it."""

import torch
from torch import Tensor

CHUNK = 512
"""Elements summed in fp32: a kernel that sums millions so is wrong by 1e-3, with these few by 1e-7."""

BLOCK = 2048 * CHUNK
"""Elements of lower precision that are brought to fp32 at a time: 4 MiB of scratch. With an eighth of them
the calls take half as long again."""


def chunk_norms(buffer: Tensor) -> list[Tensor]:
    """Norms of the chunks of a 1-D ``buffer``, in fp32, 1-D."""
    if buffer.dtype == torch.float32 or buffer.is_cuda:
        return _norms(buffer)
    scratch = torch.empty(min(BLOCK, buffer.numel()), dtype=torch.float32)
    exact = (scratch[: block.numel()].copy_(block) for block in buffer.split(BLOCK))
    return [norms for block in exact for norms in _norms(block)]


def _norms(buffer: Tensor) -> list[Tensor]:
    whole = buffer.numel() // CHUNK * CHUNK
    norms = []
    if whole:
        norms.append(torch.linalg.vector_norm(buffer[:whole].view(-1, CHUNK), dim=1, dtype=torch.float32))
    if whole < buffer.numel():
        norms.append(torch.linalg.vector_norm(buffer[whole:], dtype=torch.float32).view(1))
    return norms


def square_sum(norms: list[Tensor]) -> float:
    """Of all that ``norms`` are the ``chunk_norms`` of, on one device; summed in fp64."""
    return torch.cat(norms).double().square().sum().item() if norms else 0.0
