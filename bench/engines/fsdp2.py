"""torch's ``fully_shard``: a group for each block and one for the rest, freed after forward."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from bench.engines import ADAMW, Setup, Step, Train
from bench.models import blocks


def build(model: nn.Module, setup: Setup) -> Train:
    options: dict[str, Any] = {
        "mesh": init_device_mesh(setup.device.type, (dist.get_world_size(),)),
        "reshard_after_forward": True,
    }
    if setup.precision == "bf16":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in blocks(model):
        fully_shard(block, **options)
    fully_shard(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW, fused=True)

    def train(tokens: Tensor) -> Step:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return Step(loss.detach())

    return train
