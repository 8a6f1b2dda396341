"""Safetensors files: what one says of a tensor, and a file whose tensors are written part by part."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

ITEM_BITS = {
    "F64": 64, "I64": 64, "U64": 64, "C64": 64,
    "F32": 32, "I32": 32, "U32": 32,
    "F16": 16, "BF16": 16, "I16": 16, "U16": 16,
    "I8": 8, "U8": 8, "BOOL": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
}  # fmt: skip
"""Width of an element by the format's name of its dtype."""


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies in a safetensors file, by the file's header."""

    path: Path
    dtype: str
    """The format's own name, such as ``BF16``."""
    shape: tuple[int, ...]
    offset: int
    """Of its first byte in the file."""

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def item_bytes(self) -> int:
        return ITEM_BITS[self.dtype] // 8

    @property
    def nbytes(self) -> int:
        return self.numel * self.item_bytes


class Run(NamedTuple):
    """The elements [start, start + length) of the flattened stored tensor ``key``."""

    key: str
    start: int
    length: int


class TensorFile:
    """A new safetensors file. Its tensors are known at once, their values come in any order.

    So nobody has to hold them all to write them. A byte that is never written is zero.
    """

    def __init__(self, path: Path, tensors: Mapping[str, StoredTensor]) -> None:
        """``tensors`` gives dtype and shape of each; what else is in them is about another file."""
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        self._tensors = tensors
        self._offsets: dict[str, int] = {}
        # Widest first, so that every tensor is aligned to its own items, as readers that map the file need.
        for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].item_bytes, item[0])):
            self._offsets[name] = offset
            header[name] = {
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "data_offsets": [offset, offset + tensor.nbytes],
            }
            offset += tensor.nbytes
        content = json.dumps(header, separators=(",", ":")).encode()
        content += b" " * (-len(content) % 8)
        self._data = 8 + len(content)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        os.truncate(self._descriptor, self._data + offset)
        self._write(0, memoryview(len(content).to_bytes(8, "little") + content))

    def write(self, name: str, start: int, values: memoryview) -> None:
        """Put the bytes ``values`` at element ``start`` of the flattened tensor."""
        tensor = self._tensors[name]
        begin = start * tensor.item_bytes
        assert 0 <= begin <= begin + values.nbytes <= tensor.nbytes, (name, start, values.nbytes)
        self._write(self._data + self._offsets[name] + begin, values)

    def _write(self, offset: int, values: memoryview) -> None:
        values = values.cast("B")
        while values.nbytes:
            written = os.pwrite(self._descriptor, values, offset)
            offset += written
            values = values[written:]

    def sync(self) -> None:
        """Flush what was written to the disk."""
        os.fsync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
