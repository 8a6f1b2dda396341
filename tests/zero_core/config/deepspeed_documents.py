"""DeepSpeed documents that people have, and what is said about one."""

from typing import Any

import pytest

from zero_core.config.deepspeed_json import (
    AutoValues,
    DeepSpeedConfigError,
    DeepSpeedSettings,
    from_deepspeed,
)

ARGUMENTS = AutoValues(
    learning_rate=3e-5,
    weight_decay=0.01,
    betas=(0.9, 0.95),
    eps=1e-6,
    max_grad_norm=1.0,
    micro_batch_size=4,
    gradient_accumulation_steps=2,
    warmup_steps=50,
    total_steps=1000,
    precision="bf16",
    hidden_size=1024,
)


SHARED = """
    "bf16": {"enabled": "auto"},
    "fp16": {
        "enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16,
        "hysteresis": 2, "min_loss_scale": 1
    },
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": false,
"""


ZERO_2 = f"""{{{SHARED}
    "scheduler": {{
        "type": "WarmupLR",
        "params": {{"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}}
    }},
    "zero_allow_untested_optimizer": true,
    "zero_optimization": {{
        "stage": 2,
        "offload_optimizer": {{"device": "DEVICE", "pin_memory": true}},
        "allgather_partitions": true,
        "allgather_bucket_size": 5e8,
        "overlap_comm": true,
        "reduce_scatter": true,
        "reduce_bucket_size": 5e8,
        "contiguous_gradients": true,
        "round_robin_gradients": true
    }}
}}"""


ZERO_3 = f"""{{{SHARED}
    "scheduler": {{
        "type": "WarmupDecayLR",
        "params": {{
            "warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto",
            "total_num_steps": "auto"
        }}
    }},
    "zero_optimization": {{
        "stage": 3,
        "offload_optimizer": {{"device": "DEVICE", "pin_memory": true}},
        "offload_param": {{"device": "DEVICE", "pin_memory": true}},
        "overlap_comm": true,
        "contiguous_gradients": true,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": true
    }}
}}"""


def settings(world_size: int = 1, defaults: AutoValues | None = None, **document: Any) -> DeepSpeedSettings:
    if "train_batch_size" not in document:
        document.setdefault("train_micro_batch_size_per_gpu", 1)
    return from_deepspeed(document, world_size=world_size, defaults=defaults)


def problems(world_size: int = 1, defaults: AutoValues | None = None, **document: Any) -> dict[str, str]:
    """What is wrong with a document, by pointer."""
    with pytest.raises(DeepSpeedConfigError) as caught:
        settings(world_size, defaults, **document)
    found = {problem.pointer: str(problem) for problem in caught.value.problems}
    assert len(found) == len(caught.value.problems)
    assert str(caught.value) == "\n".join(found.values())
    return found


def pointers(warnings: tuple[str, ...]) -> list[str]:
    return [warning.split(":")[0] for warning in warnings]
