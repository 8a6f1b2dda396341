"""A model directory, judged by its files alone and without torch: what may be loaded, and its size.

Weights are read from safetensors only, since pickle files can run code when they are loaded. For the same
reason a directory that brings its own Python (``auto_map``) is refused.
"""

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

MAX_HEADER_BYTES = 64 * 2**20
"""Largest safetensors header that is read; a model of 10,000 tensors has about 1 MiB."""

_MAX_JSON_BYTES = 64 * 2**20
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_BITS = {
    "F64": 64, "I64": 64, "U64": 64, "C64": 64,
    "F32": 32, "I32": 32, "U32": 32,
    "F16": 16, "BF16": 16, "I16": 16, "U16": 16,
    "I8": 8, "U8": 8, "BOOL": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
}  # fmt: skip


class InvalidModel(ValueError):
    """A model directory that can't be used; the message says why."""

    code = "invalid_model"


@dataclass(frozen=True)
class ModelFiles:
    architecture: str
    """Class name in transformers, such as ``LlamaForCausalLM``."""

    model_type: str
    parameters: int
    """Elements in the weight files; a tied weight counts once."""

    bytes: int
    """Size of the weight files."""


def check_model_dir(path: Path) -> ModelFiles:
    """Raises InvalidModel where ``path`` is not a Hugging Face directory of a causal language model."""
    if not path.is_dir():
        raise InvalidModel(f"{path} is not a directory")
    _refuse_code(path)
    config = _read_json(path / "config.json")
    architecture = _architecture(path, config)
    if not (path / "tokenizer.json").is_file():
        raise InvalidModel(f"{path} has no tokenizer.json: save its fast tokenizer beside the weights")
    files = weight_files(path)
    return ModelFiles(
        architecture=architecture,
        model_type=str(config.get("model_type", "")),
        parameters=sum(_count_elements(file) for file in files),
        bytes=sum(file.stat().st_size for file in files),
    )


def _refuse_code(path: Path) -> None:
    for file in sorted(path.iterdir()):
        if file.suffix in _PICKLED:
            raise InvalidModel(f"{file} may hold pickled code: keep safetensors only, and remove it")
    for file in sorted(path.glob("*config.json")):
        if "auto_map" in _read_json(file):
            raise InvalidModel(f"{file} has auto_map: models that bring their own code are not loaded")


def _architecture(path: Path, config: dict[str, Any]) -> str:
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures or not isinstance(architectures[0], str):
        raise InvalidModel(f"{path / 'config.json'} names no architecture")
    if not architectures[0].endswith(("ForCausalLM", "LMHeadModel")):
        raise InvalidModel(f"{path} is a {architectures[0]}; only causal language models can be fine-tuned")
    return architectures[0]


def weight_files(path: Path) -> list[Path]:
    if (path / _WEIGHTS).is_file():  # transformers, too, looks for the single file first
        return [path / _WEIGHTS]
    if not (path / _INDEX).is_file():
        raise InvalidModel(f"{path} has neither {_WEIGHTS} nor {_INDEX}")
    weight_map = _read_json(path / _INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InvalidModel(f"{path / _INDEX} has no weight_map")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if name != Path(name).name or not name.endswith(".safetensors"):
            raise InvalidModel(f"{path / _INDEX} names {name!r}, which is no safetensors file beside it")
        if not (path / name).is_file():
            raise InvalidModel(f"{path / name} is missing: {_INDEX} names it")
    return [path / name for name in names]


def _count_elements(path: Path) -> int:
    """Elements in a safetensors file, from its header; the file's length is checked against it."""
    size = path.stat().st_size
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if header_bytes > min(MAX_HEADER_BYTES, size - 8):
            raise InvalidModel(
                f"{path} is not a safetensors file: its header would be of {header_bytes:,} bytes"
            )
        header = _parse_json(path, file.read(header_bytes))
    header.pop("__metadata__", None)
    elements = bits = 0
    for name, tensor in header.items():
        try:
            count = prod(_natural(length) for length in tensor["shape"])
            start, end = (_natural(offset) for offset in tensor["data_offsets"])
            used = count * _BITS[tensor["dtype"]]
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidModel(f"{path} describes the tensor {name!r} wrongly: {error!r}") from error
        if (end - start) * 8 != used:
            raise InvalidModel(f"{path} gives the tensor {name!r} {end - start} bytes; it needs {used // 8}")
        elements += count
        bits += used
    expected = 8 + header_bytes + bits // 8
    if size != expected:
        raise InvalidModel(f"{path} has {size:,} bytes; {expected:,} are expected: copy it again")
    return elements


def _natural(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r} is no size")
    return value


def _read_json(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise InvalidModel(f"{path} has more than {_MAX_JSON_BYTES:,} bytes")
        return _parse_json(path, path.read_bytes())
    except FileNotFoundError:
        raise InvalidModel(f"{path} is missing: a Hugging Face model directory has one") from None


def _parse_json(path: Path, content: bytes) -> dict[str, Any]:
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise InvalidModel(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidModel(f"{path} is not a JSON object")
    return value
