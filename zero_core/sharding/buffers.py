"""Buffers of the model, which no optimizer updates: equal at start, and kept equal.

At start every rank takes rank 0's. Those of normalization layers take the parameters' dtype, which their
kernels insist on; all others keep their own, since positions lose their meaning in bf16. Running
statistics then move with each rank's own batches (BatchNorm), so after each step they are averaged over
the ranks: none drifts, and a checkpoint of one rank's is everybody's. The average is over what ranks saw,
as if each had an equal part of the batch.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from zero_core.comm.collectives import Communicator


def normalizations(model: nn.Module) -> list[nn.Module]:
    """The layers that keep running statistics."""
    return [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._NormBase)]


def adopt_buffers(model: nn.Module, dtype: torch.dtype, communicator: Communicator) -> None:
    """Rank 0's buffers on every rank, running statistics in ``dtype``. Collective."""
    for layer in normalizations(model):
        for buffer in _statistics(layer):
            buffer.data = buffer.data.to(dtype)
    for buffer in model.buffers():
        communicator.broadcast(buffer)


def average_statistics(layers: list[nn.Module], communicator: Communicator) -> None:
    """Average the running statistics of ``layers`` over all ranks. Collective."""
    if communicator.world_size == 1:
        return
    statistics = [buffer for layer in layers if layer.training for buffer in _statistics(layer)]
    if not statistics:
        return
    together = torch.cat([buffer.reshape(-1).double().cpu() for buffer in statistics])
    together = communicator.agree(together) / communicator.world_size
    for buffer, mean in zip(statistics, together.split([b.numel() for b in statistics]), strict=True):
        buffer.copy_(mean.view(buffer.shape))


def _statistics(layer: nn.Module) -> Iterator[Tensor]:
    """The running mean and variance."""
    return (buffer for buffer in layer.buffers(recurse=False) if buffer.is_floating_point())
