"""A model directory, judged by its files alone and without torch: what may be loaded, and its size.

Weights are read from safetensors only, since pickle files can run code when they are loaded. For the same
reason a directory that brings its own Python (``auto_map``) is refused.
"""

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from zero_core.checkpoints.tensor_file import ITEM_BITS, StoredTensor

MAX_HEADER_BYTES = 64 * 2**20
"""Largest safetensors header that is read; a model of 10,000 tensors has about 1 MiB."""

_MAX_JSON_BYTES = 64 * 2**20
_BESIDE = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".bpe", ".vocab")
_BESIDE_NAMES = ("LICENSE", "NOTICE")
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"


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
    files_beside(path)
    files = weight_files(path)
    return ModelFiles(
        architecture=architecture,
        model_type=str(config.get("model_type", "")),
        parameters=sum(tensor.numel for file in files for tensor in _read_header(file).values()),
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


def files_beside(path: Path) -> list[Path]:
    """What belongs to a model beside its weights: configs, the tokenizer's files, its license.

    Raises InvalidModel for a link that leads elsewhere, since what it leads to would become part of a
    result that others read. One into the blobs of the hub's cache, where whole models are links, does not.
    """
    blobs = path.resolve().parent.parent / "blobs"
    beside = []
    for file in sorted(path.iterdir()):
        if file.name.startswith(".") or file.name.endswith(".index.json") or not file.is_file():
            continue
        if file.suffix in _BESIDE or file.name in _BESIDE_NAMES:
            if file.resolve().parent not in (path.resolve(), blobs):
                raise InvalidModel(f"{file} is a link to {file.resolve()}: put the file itself there")
            beside.append(file)
    return beside


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """Every tensor of the directory's weight files. Raises InvalidModel."""
    return {name: tensor for file in weight_files(path) for name, tensor in _read_header(file).items()}


def _read_header(path: Path) -> dict[str, StoredTensor]:
    """What is in a safetensors file; it must fill the file without a gap."""
    size = path.stat().st_size
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if header_bytes > min(MAX_HEADER_BYTES, size - 8):
            raise InvalidModel(
                f"{path} is not a safetensors file: its header would be of {header_bytes:,} bytes"
            )
        header = _parse_json(path, file.read(header_bytes))
    header.pop("__metadata__", None)
    tensors = {}
    begins = []
    for name, entry in header.items():
        try:
            shape = tuple(_natural(length) for length in entry["shape"])
            start, end = (_natural(offset) for offset in entry["data_offsets"])
            used = prod(shape) * ITEM_BITS[entry["dtype"]] // 8
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidModel(f"{path} describes the tensor {name!r} wrongly: {error!r}") from error
        if end - start != used:
            raise InvalidModel(f"{path} gives the tensor {name!r} {end - start} bytes; it needs {used}")
        tensors[name] = StoredTensor(path, entry["dtype"], shape, 8 + header_bytes + start)
        begins.append((start, end, name))
    expected = 8 + header_bytes + sum(tensor.nbytes for tensor in tensors.values())
    if size != expected:
        raise InvalidModel(f"{path} has {size:,} bytes; {expected:,} are expected: copy it again")
    filled = 0
    for start, end, name in sorted(begins):
        if start != filled:
            raise InvalidModel(
                f"{path} puts the tensor {name!r} at byte {start:,} of its data, not {filled:,}"
            )
        filled = end
    return tensors


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
