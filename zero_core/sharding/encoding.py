"""How a frozen parameter is kept and gathered, where that is not the dtype of compute.

Nothing updates a frozen parameter, so its values may be encoded once and for all: in fewer bits, or in the
narrower dtype that they were stored in. A flat parameter's packed form lies in segments of ``SEGMENT``
elements, each packed for itself: so it is encoded and decoded without large temporaries, and two packed
shards one behind the other are decoded one after the other. Shards start at multiples of the block, and so
does every parameter: which elements share a block depends on neither the number of ranks nor the stage.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from zero_core.comm.nf4 import NormalFloat4
from zero_core.comm.quantization import BlockQuantizer
from zero_core.config.zero import FrozenQuantization, Precision
from zero_core.planner.formulas import Storage

BLOCK = 64
"""Elements that share a scale, in both quantizations (Dettmers et al. 2023)."""

SEGMENT = 2**18
"""Elements, a multiple of every block: small enough that an fp32 copy of them stays in the cache."""


class Encoding(Protocol):
    """A packed form of floating-point values; all of its methods take whole blocks."""

    @property
    def block_size(self) -> int: ...

    def packed_bytes(self, numel: int) -> int:
        """Size of the packed form; of two parts together it is the sum."""
        ...

    def quantize(self, values: Tensor, out: Tensor) -> None:
        """Pack ``values`` (1-D, any float dtype) into ``out`` (1-D uint8 of ``packed_bytes``)."""
        ...

    def dequantize(self, packed: Tensor, out: Tensor) -> None:
        """Unpack into ``out`` (1-D, any float dtype), whose length tells how many elements there are."""
        ...


@dataclass(frozen=True)
class KeptAs:
    """The values in a dtype narrower than that of compute, which holds all of them exactly."""

    dtype: torch.dtype
    block_size: int = 1

    def packed_bytes(self, numel: int) -> int:
        return numel * self.dtype.itemsize

    def quantize(self, values: Tensor, out: Tensor) -> None:
        out.view(self.dtype).copy_(values)

    def dequantize(self, packed: Tensor, out: Tensor) -> None:
        out.copy_(packed.view(self.dtype))


QUANTIZERS: dict[FrozenQuantization, Encoding] = {
    "nf4": NormalFloat4(BLOCK),
    "int8": BlockQuantizer(bits=8, block_size=BLOCK),
}


_STORED: dict[torch.dtype, Storage] = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def storage_of(encoding: Encoding | None, precision: Precision) -> Storage:
    """What the planner calls it; ``precision`` is that of compute."""
    if encoding is None:
        return precision
    if isinstance(encoding, KeptAs):
        return _STORED[encoding.dtype]
    return next(name for name, quantizer in QUANTIZERS.items() if quantizer == encoding)


def kept_as_stored(stored: torch.dtype, compute: torch.dtype) -> KeptAs | None:
    """How a frozen parameter is kept that nothing quantizes; None: in the dtype of compute."""
    return KeptAs(stored) if stored.itemsize < compute.itemsize else None


def encode(
    encoding: Encoding, values: Callable[[int, int], Tensor], numel: int, device: torch.device
) -> Tensor:
    """The packed form of ``numel`` elements, of which ``values`` gives any range."""
    packed = torch.empty(encoding.packed_bytes(numel), dtype=torch.uint8, device=device)
    for begin in range(0, numel, SEGMENT):
        end = min(begin + SEGMENT, numel)
        encoding.quantize(values(begin, end), _segment(encoding, packed, begin, end))
    return packed


def decode(encoding: Encoding, packed: Tensor, out: Tensor) -> None:
    """Unpack what ``encode`` packed into ``out`` (1-D, any float dtype)."""
    for begin in range(0, out.numel(), SEGMENT):
        end = min(begin + SEGMENT, out.numel())
        encoding.dequantize(_segment(encoding, packed, begin, end), out[begin:end])


def _segment(encoding: Encoding, packed: Tensor, begin: int, end: int) -> Tensor:
    return packed[encoding.packed_bytes(begin) : encoding.packed_bytes(end)]
