"""Bytes that a plan needs, from closed formulas: no torch, so the service can ask before anything runs."""

from zero_core.config.zero import Precision


def model_state_bytes(parameters: int, world_size: int, stage: int, precision: Precision) -> dict[str, int]:
    """A rank's parameters, gradients and optimizer state, in bytes, at the end of a step's backward.

    Rajbhandari et al. 2020, section 3.1 and figure 1. In bf16 and fp16 the optimizer has fp32 master
    weights, momentum and variance (K = 12); in fp32 the parameters are their own masters (K = 8).
    """
    working, optimizer = (4, 8) if precision == "fp32" else (2, 12)
    shard = parameters / world_size
    return {
        "parameters": round(working * (shard if stage >= 3 else parameters)),
        "gradients": round(working * (shard if stage >= 2 else parameters)),
        "optimizer": round(optimizer * (shard if stage >= 1 else parameters)),
    }
