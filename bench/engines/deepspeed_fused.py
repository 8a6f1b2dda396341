"""DeepSpeed's ZeRO stages over torch's fused AdamW: faster than what a user of its configuration gets."""

import torch
from torch import nn

from bench.engines import ADAMW, Setup, Train
from bench.engines.deepspeed import train_with


def build(model: nn.Module, setup: Setup) -> Train:
    return train_with(model, setup, optimizer=torch.optim.AdamW(model.parameters(), **ADAMW, fused=True))
