"""torch's own mixed precision: fp32 weights, matrix products in bf16."""

from contextlib import AbstractContextManager, nullcontext

import torch

from bench.engines import Setup


def forward_context(setup: Setup) -> AbstractContextManager[object]:
    """What a forward pass of an engine without mixed precision of its own runs under."""
    if setup.precision == "fp32":
        return nullcontext()
    return torch.autocast(setup.device.type, torch.bfloat16)
