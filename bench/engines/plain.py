"""The model and a fused AdamW on one rank: what an engine adds is measured against it."""

import torch
from torch import Tensor, nn

from bench.engines import ADAMW, Setup, Step, Train
from bench.engines.mixed_precision import forward_context


def build(model: nn.Module, setup: Setup) -> Train:
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW, fused=True)

    def train(tokens: Tensor) -> Step:
        with forward_context(setup):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return Step(loss.detach())

    return train
