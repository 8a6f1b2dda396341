"""Block quantization of what travels between ranks (ZeRO++, Wang et al. 2023, section 3).

A packed buffer is the integer codes of all elements, then one fp32 scale for each block. A code times
its block's scale is the value, so a block of zeros comes back as exact zeros. A block that holds a
non-finite value gets a non-finite scale and comes back non-finite in every element: whoever takes the
norm of the result still sees the overflow.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

_SCALE_BYTES = 4
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny
_CHUNK_CPU = 2**20
"""Elements worked on at a time: with their fp32 copy in the cache, a quarter of the time of all at once."""

_CHUNK_ACCELERATOR = 2**24
"""Large, since each chunk costs some launches."""


@dataclass(frozen=True)
class BlockQuantizer:
    """Symmetric quantization to ``bits`` in blocks of consecutive elements; the last block may be shorter."""

    bits: int
    """8 or 4."""

    block_size: int = 256
    """Elements that share a scale; an even number, so that no byte holds codes of two blocks."""

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise ValueError(f"bits: {self.bits!r} is not 4 or 8")
        if self.block_size < 2 or self.block_size % 2:
            raise ValueError(f"block_size: {self.block_size!r} is not a positive even number")

    def packed_bytes(self, numel: int) -> int:
        """Size of the packed form of ``numel`` elements."""
        return self._code_bytes(numel) + _SCALE_BYTES * math.ceil(numel / self.block_size)

    def quantize(self, values: Tensor, out: Tensor) -> None:
        """Pack ``values`` (1-D, any float dtype) into ``out`` (1-D uint8 of ``packed_bytes``)."""
        codes, scales = self._sections(out, values.numel())
        workspace = values.new_empty(min(self._chunk(values), values.numel()), dtype=torch.float32)
        for part in self._parts(values):
            rows = workspace[: part.end - part.begin].view(part.rows, -1)
            rows.copy_(values[part.begin : part.end].view(part.rows, -1))
            scale = self._scales(rows)
            rows.mul_(scale.reciprocal()).round_()
            self._store(rows, codes[self._code_bytes(part.begin) : self._code_bytes(part.end)])
            block = part.begin // self.block_size
            scales[block : block + part.rows].copy_(scale.view(torch.uint8))

    def dequantize(self, packed: Tensor, out: Tensor) -> None:
        """Unpack into ``out`` (1-D, any float dtype), whose length tells how many elements there are."""
        codes, scale_bytes = self._sections(packed, out.numel())
        scales = scale_bytes.clone().view(torch.float32)  # cloned: it may start at any byte
        for part in self._parts(out):
            rows = out[part.begin : part.end].view(part.rows, -1)
            block = part.begin // self.block_size
            scale = scales[block : block + part.rows]
            stored = codes[self._code_bytes(part.begin) : self._code_bytes(part.end)]
            self._restore(stored.view(torch.int8).view(part.rows, -1), scale, rows)

    def error_bound(self, values: Tensor) -> Tensor:
        """Largest error of an element in each block (fp32, one a block): half a step of its scale.

        The term beside the half is what three fp32 roundings can add at the largest code. A dtype lower
        than fp32 that is unpacked into adds its own rounding, and what is within a rounding of fp32's
        largest number may come back infinite.
        """
        step = [self._scales(values[p.begin : p.end].view(p.rows, -1).float()) for p in self._parts(values)]
        return torch.cat(step).squeeze(1) * (0.5 + self._largest_code * 2**-22)

    @property
    def _largest_code(self) -> int:
        return 2 ** (self.bits - 1) - 1

    def _code_bytes(self, numel: int) -> int:
        return math.ceil(numel * self.bits / 8)

    def _sections(self, packed: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        """The codes, and the bytes of the scales with a row for each."""
        assert packed.dtype == torch.uint8, packed.dtype
        assert packed.numel() == self.packed_bytes(numel), (packed.numel(), numel)
        end = self._code_bytes(numel)
        return packed[:end], packed[end:].view(-1, _SCALE_BYTES)

    def _parts(self, values: Tensor) -> Iterator["_Part"]:
        """Runs of whole blocks, each small enough to be worked on at once; then the shorter last block."""
        whole = values.numel() // self.block_size * self.block_size
        chunk = self._chunk(values)
        for begin in range(0, whole, chunk):
            end = min(begin + chunk, whole)
            yield _Part(begin, end, (end - begin) // self.block_size)
        if whole < values.numel():
            yield _Part(whole, values.numel(), 1)

    def _chunk(self, values: Tensor) -> int:
        chunk = _CHUNK_CPU if values.device.type == "cpu" else _CHUNK_ACCELERATOR
        return max(1, chunk // self.block_size) * self.block_size

    def _scales(self, rows: Tensor) -> Tensor:
        """The scale of each row: the largest magnitude has the largest code.

        Never below the smallest normal number, so that its reciprocal is finite; of a NaN, NaN.
        """
        largest = torch.maximum(rows.amax(1, keepdim=True), rows.amin(1, keepdim=True).neg_())
        return largest.div_(self._largest_code).clamp_min_(_SMALLEST_SCALE)

    def _store(self, rows: Tensor, codes: Tensor) -> None:
        """Codes as bytes; of 4 bits, the first half of a block in the low and the second in the high ones."""
        target = codes.view(torch.int8).view(rows.shape[0], -1)
        if self.bits == 8:
            target.copy_(rows)
            return
        whole = rows.to(torch.int8)
        half = target.shape[1]
        torch.bitwise_and(whole[:, :half], 15, out=target)
        target[:, : rows.shape[1] - half].bitwise_or_(whole[:, half:] << 4)

    def _restore(self, codes: Tensor, scale: Tensor, rows: Tensor) -> None:
        if self.bits == 8:
            torch.mul(codes, scale, out=rows)
            return
        half = codes.shape[1]
        # Shifted up and down again, a code's sign bit fills the byte.
        torch.mul(codes << 4 >> 4, scale, out=rows[:, :half])
        torch.mul(codes[:, : rows.shape[1] - half] >> 4, scale, out=rows[:, half:])


@dataclass(frozen=True)
class _Part:
    """The elements [begin, end), which are ``rows`` blocks of equal size."""

    begin: int
    end: int
    rows: int
