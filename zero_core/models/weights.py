"""Slices of a model's weights, so that a sharded engine loads a model larger than one rank's memory.

``empty_model`` builds the model without values, ``open_weights`` finds them, and ``WeightFiles`` hands out
any range of any parameter. transformers is imported on use: a rank that only reads files does without it.
"""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from zero_core.models.model_files import InvalidModel, check_model_dir, weight_files

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


class WeightFiles:
    """The weights of one Hugging Face model directory, in one safetensors file or several.

    The files are mapped, not read: memory holds what ``read`` returned, and the pages it touched belong to
    the page cache.
    """

    def __init__(self, stored: Mapping[str, "_Stored"]) -> None:
        self._stored = stored
        self.bytes_read = 0
        """Bytes that ``read`` has returned."""

    @classmethod
    def open(
        cls,
        directory: Path,
        names: Mapping[str, tuple[int, ...]],
        *,
        aliases: Mapping[str, list[str]] | None = None,
        base_model_prefix: str = "",
    ) -> "WeightFiles":
        """Find the stored tensor of each of ``names``, which maps parameters and buffers to their shapes.

        It is stored under the name itself, under one of its ``aliases`` (the other names of a tied
        parameter), or under one of those with the base model's prefix added or taken away. Raises
        InvalidModel for a directory that can't be used, and where a tensor is missing, has another shape,
        or differs from what is stored under an alias.
        """
        stored = _stored_tensors(directory)
        found: dict[str, _Stored] = {}
        missing, mismatched, untied = [], [], []
        for name, shape in names.items():
            tied = [name, *(aliases or {}).get(name, [])]
            keys = [key for key in _keys(tied, base_model_prefix) if key in stored]
            # What is itself the name of another parameter is not this one with a prefix.
            keys = [key for key in keys if key in tied or key not in names]
            if not keys:
                missing.append(name)
            elif any(stored[key].shape != shape for key in keys):
                mismatched.append(name)
            elif any(not stored[key].equals(stored[keys[0]]) for key in keys[1:]):
                untied.append(name)
            else:
                found[name] = stored[keys[0]]
        _refuse(directory, "missing", missing)
        _refuse(directory, "mismatched", mismatched)
        _refuse(directory, "tied, but stored with several values", untied)
        return cls(found)

    def read(self, name: str, start: int, length: int) -> Tensor:
        """The elements [start, start + length) of the flattened tensor, 1-D and in the stored dtype."""
        values = self._stored[name].read(start, length)
        self.bytes_read += values.nbytes
        return values


class _Stored:
    """One tensor in an open safetensors file."""

    def __init__(self, file: Any, key: str) -> None:
        self._file = file
        self._key = key
        self.shape = tuple(file.get_slice(key).get_shape())

    def read(self, start: int, length: int) -> Tensor:
        numel = math.prod(self.shape)
        assert 0 <= start < start + length <= numel, (self._key, start, length, numel)
        if not self.shape:
            return self._whole().reshape(1).clone()
        row = numel // self.shape[0]
        first, last = start // row, math.ceil((start + length) / row)
        rows: Tensor = self._file.get_slice(self._key)[first:last]
        # A copy, since what the file gives is a view of its mapping.
        return rows.reshape(-1)[start - first * row :][:length].clone()

    def equals(self, other: "_Stored") -> bool:
        return torch.equal(self._whole(), other._whole())

    def _whole(self) -> Tensor:
        whole: Tensor = self._file.get_tensor(self._key)
        return whole


def open_weights(directory: Path, model: "PreTrainedModel") -> WeightFiles:
    """The stored values of ``model``'s parameters; its persistent buffers are filled at once.

    Each parameter goes by the name that ``named_parameters`` gives it. Raises InvalidModel.
    """
    first: dict[int, str] = {}
    aliases: dict[str, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            aliases.setdefault(first[id(parameter)], []).append(name)
    kept = model.state_dict().keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in kept}
    names = {name: tuple(tensor.shape) for name, tensor in [*model.named_parameters(), *buffers.items()]}
    files = WeightFiles.open(directory, names, aliases=aliases, base_model_prefix=model.base_model_prefix)
    for name, buffer in buffers.items():
        buffer.copy_(files.read(name, 0, buffer.numel()).view(buffer.shape))
    return files


def empty_model(path: Path, dtype: torch.dtype) -> "PreTrainedModel":
    """The causal language model of a directory, ready to train but for its values.

    Parameters are on the meta device, in ``dtype`` and tied as the config says. Buffers are real and have
    the values that the config gives them; a persistent one's stored value is still to be read. Raises
    InvalidModel, also for weights that transformers would rename, convert or dequantize while it loads
    them, since a slice of what is stored is then no slice of the parameter.
    """
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    from zero_core.models.loading import switch_off_dropout

    stored = _stored_tensors(path)
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        switch_off_dropout(config)
        with init_empty_weights(include_buffers=False):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation="sdpa", trust_remote_code=False
            )
    except (ValueError, KeyError, OSError, ImportError) as error:
        raise InvalidModel(f"{path} can't be loaded: {error}") from error
    _refuse_quantized(path, model.config)
    _refuse_converted(path, model, stored)
    # Each module got meta parameters of its own, also where the constructor had tied two.
    model.tie_weights()
    switch_off_dropout(model)
    model.config.use_cache = False
    _load_generation_config(path, model)
    return model


def _stored_tensors(directory: Path) -> dict[str, _Stored]:
    check_model_dir(directory)
    stored = {}
    for path in weight_files(directory):
        try:
            file = safe_open(path, framework="pt")
        except SafetensorError as error:
            raise InvalidModel(f"{path} can't be read: {error}") from error
        stored.update({key: _Stored(file, key) for key in sorted(file.keys())})
    return stored


def _keys(names: Iterable[str], prefix: str) -> list[str]:
    """The keys that any of ``names`` may be stored under: the names themselves first."""
    exact = list(names)
    if not prefix:
        return exact
    return exact + [
        name.removeprefix(f"{prefix}.") if name.startswith(f"{prefix}.") else f"{prefix}.{name}"
        for name in exact
    ]


def _refuse(directory: Path, problem: str, names: list[str]) -> None:
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise InvalidModel(
            f"{directory}: weights do not fit its config ({problem}: {', '.join(names[:3])}{more})"
        )


def _refuse_quantized(path: Path, config: "PretrainedConfig") -> None:
    if getattr(config, "quantization_config", None) is not None:
        raise InvalidModel(f"{path} holds quantized weights: save it in fp32, bf16 or fp16")


def _refuse_converted(path: Path, model: "PreTrainedModel", keys: Iterable[str]) -> None:
    """A converted tensor may keep its name and shape, as rotary rows that are stored in another order."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    for key in sorted(keys):
        renamed, converted = rename_source_key(key, renamings, converters)
        if converted is not None or renamed != key:
            raise InvalidModel(
                f"{path} can't be loaded in slices: transformers makes {renamed} from the stored {key}"
            )


def _load_generation_config(path: Path, model: "PreTrainedModel") -> None:
    """As from_pretrained does; what a directory without the file generates with is in its config."""
    from transformers import GenerationConfig

    if (path / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(path, local_files_only=True)
