"""torch's ZeroRedundancyOptimizer over DDP: whole parameters of the optimizer dealt to the ranks."""

import torch
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from bench.engines import ADAMW, Setup, Step, Train
from bench.engines.mixed_precision import forward_context


def build(model: nn.Module, setup: Setup) -> Train:
    replica = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(
        replica.parameters(), optimizer_class=torch.optim.AdamW, **ADAMW, fused=True
    )

    def train(tokens: Tensor) -> Step:
        with forward_context(setup):
            loss = replica(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return Step(loss.detach())

    return train
