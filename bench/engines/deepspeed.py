"""DeepSpeed's ZeRO stages with the AdamW of torch that its configuration makes; all sharded at stage 3."""

import logging
import os
from typing import Any

import torch
from torch import Tensor, nn

from bench.engines import ADAMW, Setup, Step, Train

if not torch.cuda.is_available():
    # Read when deepspeed is imported, which otherwise picks by the accelerator libraries that it finds.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed


def build(model: nn.Module, setup: Setup) -> Train:
    options = ADAMW | {"torch_adam": True}
    return train_with(model, setup, config={"optimizer": {"type": "AdamW", "params": options}})


def train_with(
    model: nn.Module,
    setup: Setup,
    *,
    config: dict[str, Any] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> Train:
    """``config`` comes on top of what is the same for both optimizers."""
    # It reports its configuration at length, in every run.
    logging.disable(logging.WARNING)
    # Compiled in every fresh environment, for minutes, and used for inference's all-reduce alone.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    common: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": setup.rows,
        "zero_optimization": {"stage": setup.stage},
        # By default it clips the gradient's norm to 1, which none of the others does.
        "gradient_clipping": 0.0,
        # Said of any optimizer that DeepSpeed does not ship itself.
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": setup.precision == "bf16"},
    }
    if setup.stage == 3:
        # By default small parameters stay whole, which is no stage 3 for a model of small blocks.
        common["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    deepspeed.init_distributed("nccl" if setup.device.type == "cuda" else "gloo")
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=common | (config or {}))

    def train(tokens: Tensor) -> Step:
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        return Step(loss.detach())

    return train
