"""torch's DistributedDataParallel with its defaults: everything whole on every rank."""

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bench.engines import Setup, Train, plain


def build(model: nn.Module, setup: Setup) -> Train:
    return plain.build(DistributedDataParallel(model), setup)
