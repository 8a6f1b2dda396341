import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from zero_core.checkpoints.tensor_dtypes import DTYPES
from zero_core.checkpoints.tensor_file import ITEM_BITS, StoredTensor, TensorFile
from zero_core.memory.tensor_bytes import bytes_of


def test_tensors_written_in_parts_are_what_safetensors_reads(tmp_path: Path) -> None:
    """Of odd sizes and several widths."""
    values = {
        "bf16": torch.randn(3, 5).bfloat16(),
        "fp32": torch.randn(7),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "bytes": torch.arange(5, dtype=torch.uint8),
        "none": torch.zeros(0, 4),
    }
    codes = {dtype: code for code, dtype in DTYPES.items()}
    described = {
        name: StoredTensor(Path("elsewhere"), codes[value.dtype], tuple(value.shape), 0)
        for name, value in values.items()
    }
    with TensorFile(tmp_path / "file.safetensors", described) as file:
        for name, value in values.items():
            flat = value.reshape(-1)
            for start in reversed(range(0, flat.numel(), 2)):
                file.write(name, start, bytes_of(flat[start : start + 2].clone()))
    read = load_file(tmp_path / "file.safetensors")
    with (tmp_path / "file.safetensors").open("rb") as written:
        length = int.from_bytes(written.read(8), "little")
        header = json.loads(written.read(length))
    # Whoever maps the file uses the values in place.
    assert length % 8 == 0
    assert all(header[name]["data_offsets"][0] % value.itemsize == 0 for name, value in values.items())
    assert read.keys() == values.keys()
    assert all(
        torch.equal(read[name], value) and read[name].dtype == value.dtype for name, value in values.items()
    )


def test_what_is_never_written_is_zero(tmp_path: Path) -> None:
    with TensorFile(tmp_path / "file", {"a": StoredTensor(Path("elsewhere"), "F32", (4,), 0)}) as file:
        file.write("a", 1, bytes_of(torch.ones(1)))
        with pytest.raises(AssertionError):
            file.write("a", 3, bytes_of(torch.ones(2)))
    assert load_file(tmp_path / "file")["a"].tolist() == [0, 1, 0, 0]


def test_every_dtype_of_the_format_has_torchs_width() -> None:
    assert DTYPES.keys() == ITEM_BITS.keys()
    assert all(8 * dtype.itemsize == ITEM_BITS[code] for code, dtype in DTYPES.items())
