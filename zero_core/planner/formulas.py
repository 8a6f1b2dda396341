"""Bytes that a plan needs, from closed formulas: no torch, so the service can ask before anything runs."""

from collections.abc import Mapping
from types import MappingProxyType

from zero_core.config.zero import FrozenQuantization, Precision

Storage = Precision | FrozenQuantization
"""How frozen parameters are kept."""

STORED_BYTES: Mapping[Storage, float] = MappingProxyType(
    # Quantized: the codes, and one fp32 scale for each block of 64.
    {"fp32": 4, "bf16": 2, "fp16": 2, "int8": 1 + 4 / 64, "nf4": 1 / 2 + 4 / 64}
)
"""Bytes an element."""

NOTHING_FROZEN: Mapping[Storage, int] = MappingProxyType({})


def model_state_bytes(
    parameters: int,
    world_size: int,
    stage: int,
    precision: Precision,
    frozen: Mapping[Storage, int] = NOTHING_FROZEN,
) -> dict[str, int]:
    """A rank's parameters, gradients and optimizer state, in bytes, at the end of a step's backward.

    Rajbhandari et al. 2020, section 3.1 and figure 1, for the trainable ``parameters``. In bf16 and fp16 the
    optimizer has fp32 master weights, momentum and variance (K = 12); in fp32 the parameters are their own
    masters (K = 8). ``frozen`` has the other elements by how they are kept; they have no other state, and at
    stage 3 they are sharded like the rest.
    """
    working, optimizer = (4, 8) if precision == "fp32" else (2, 12)
    shard = parameters / world_size
    kept = sum(STORED_BYTES[storage] * elements for storage, elements in frozen.items())
    return {
        "parameters": round((working * parameters + kept) / (world_size if stage >= 3 else 1)),
        "gradients": round(working * (shard if stage >= 2 else parameters)),
        "optimizer": round(optimizer * (shard if stage >= 1 else parameters)),
    }


def unit_bytes(precision: Precision, stage: int, trainable: int, frozen: Mapping[Storage, int]) -> int:
    """What one unit takes beside the model states while it is used, in bytes.

    At stage 3 all of it is gathered; elsewhere what is kept in fewer bytes is decoded.
    """
    working = STORED_BYTES[precision]
    brought = [n for storage, n in frozen.items() if stage >= 3 or STORED_BYTES[storage] < working]
    return round(working * ((trainable if stage >= 3 else 0) + sum(brought)))
