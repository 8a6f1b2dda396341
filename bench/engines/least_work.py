"""What no engine of stages 1 to 3 can leave out: the model, and a rank's part of the update.

Nothing is reduced or gathered, so nothing is trained: what an engine takes beyond this is its own price.
Memory comes from torch's allocator, so page faults that an engine may spare are in it.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench.engines import ADAMW, Setup, Step, Train


def build(model: nn.Module, setup: Setup) -> Train:
    elements = sum(parameter.numel() for parameter in model.parameters()) // dist.get_world_size()
    master = torch.zeros(elements, device=setup.device, requires_grad=True)
    master.grad = torch.ones_like(master)
    optimizer = torch.optim.AdamW([master], **ADAMW, fused=True)
    if setup.precision == "bf16":
        model.to(torch.bfloat16)

    def train(tokens: Tensor) -> Step:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        model.zero_grad()
        optimizer.step()
        return Step(loss.detach())

    return train
