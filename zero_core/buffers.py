"""Buffers of the model, which no optimizer updates: equal at start, and kept equal.

At start every rank takes rank 0's. Running statistics then move with each rank's own batches (BatchNorm),
so after each step the floating ones are averaged over the ranks: none drifts, and a checkpoint of one
rank's is everybody's. The average is over what ranks saw, as if each had an equal part of the batch.
"""

import torch
from torch import nn

from zero_core.collectives import Communicator


def adopt_buffers(model: nn.Module, communicator: Communicator) -> None:
    """Rank 0's buffers on every rank. Collective."""
    for buffer in model.buffers():
        communicator.broadcast(buffer)


def average_statistics(model: nn.Module, communicator: Communicator) -> None:
    """Average the running statistics of normalization layers over all ranks. Collective."""
    if communicator.world_size == 1:
        return
    statistics = [
        buffer
        for module in model.modules()
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.training
        for buffer in module.buffers(recurse=False)
        if buffer.is_floating_point()
    ]
    if not statistics:
        return
    together = torch.cat([buffer.reshape(-1).double().cpu() for buffer in statistics])
    together = communicator.agree(together) / communicator.world_size
    for buffer, mean in zip(statistics, together.split([b.numel() for b in statistics]), strict=True):
        buffer.copy_(mean.view(buffer.shape))
