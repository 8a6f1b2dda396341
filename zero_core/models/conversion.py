"""Under which stored tensors a model's parameters are found, by transformers' own rules of loading.

It renames stored keys, adds or drops the base model's prefix, and joins or cuts what older versions stored
otherwise (``conversion_mapping``). Renaming is only names here, joining and cutting are slices, and what is
neither is converted with the library's own operations, one group of tensors at a time.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    Interleave,
    MergeModulelist,
    PermuteForRope,
    Split,
    SplitModulelist,
    Transpose,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from zero_core.checkpoints.tensor_file import StoredTensor
from zero_core.models.slices import NotSlices, SliceMap, trace

_MOVES_ONLY = (
    Chunk, Concatenate, Interleave, MergeModulelist, PermuteForRope, Split, SplitModulelist, Transpose,
)  # fmt: skip
"""Operations whose results are the elements of what they are given, in another order."""

Convert = Callable[[Sequence[Tensor]], dict[str, Tensor]]


class Unloadable(ValueError):
    """Stored tensors that a model's rules of loading don't fit."""


@dataclass(frozen=True)
class Converted:
    """Stored tensors that become parameters by more than slicing; always all of them at once."""

    tensors: Mapping[str, StoredTensor]
    names: tuple[str, ...]
    """Of the parameters that they become."""

    _convert: Convert

    def convert(self, stored: Sequence[Tensor]) -> dict[str, Tensor]:
        """The parameters, by name, of the stored tensors in their order."""
        return self._convert(stored)

    def revert(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The stored tensors, by key, that become ``parameters``. Takes 8 bytes an element meanwhile."""
        sizes = [tensor.numel for tensor in self.tensors.values()]
        numbers = torch.arange(sum(sizes)).split(sizes)
        shapes = [tensor.shape for tensor in self.tensors.values()]
        places = self._convert([part.view(shape) for part, shape in zip(numbers, shapes, strict=True)])
        flat = torch.empty(sum(sizes), dtype=next(iter(parameters.values())).dtype)
        for name, place in places.items():
            flat[place.reshape(-1)] = parameters[name].reshape(-1)
        return {
            key: part.view(shape)
            for key, part, shape in zip(self.tensors, flat.split(sizes), shapes, strict=True)
        }


@dataclass
class Sources:
    """What each name of ``state_dict`` is made of."""

    slices: dict[str, list[SliceMap]] = field(default_factory=dict)
    """More than one where the same tensor is stored several times."""
    converted: dict[str, Converted] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def __contains__(self, name: str) -> bool:
        return name in self.shapes


@dataclass(frozen=True)
class _Group:
    """Stored keys that one converter takes together, by the pattern that they matched."""

    converter: WeightConverter
    keys: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))


def find_sources(model: PreTrainedModel, stored: Mapping[str, StoredTensor]) -> Sources:
    """Match what is stored with the names of ``model``; stored tensors that it has no place for are left out.

    Raises Unloadable.
    """
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    wanted = model.state_dict()
    sources = Sources()
    groups: dict[str, _Group] = {}
    for key in sorted(stored, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, wanted)
        if name not in wanted and key in wanted:
            name, pattern = key, None
        if name not in wanted:
            continue
        if pattern is not None:
            groups.setdefault(name, _Group(by_pattern[pattern])).keys[pattern].append(key)
        elif stored[key].shape == sources.shapes.setdefault(name, stored[key].shape):
            sources.slices.setdefault(name, []).append(SliceMap.whole(key, stored[key].numel))
    for name, group in groups.items():
        _add_group(sources, name, group, model, stored)
    return sources


def _add_group(
    sources: Sources, name: str, group: _Group, model: PreTrainedModel, stored: Mapping[str, StoredTensor]
) -> None:
    patterns = [pattern for pattern, keys in group.keys.items() for _ in keys]
    tensors = {key: stored[key] for keys in group.keys.values() for key in keys}

    @torch.no_grad()
    def convert(values: Sequence[Tensor]) -> dict[str, Tensor]:
        converter = deepcopy(group.converter)
        for pattern, value in zip(patterns, values, strict=True):
            collected: dict[str, list[Any]] = converter.collected_tensors
            collected[pattern].append(value)
        results = converter.convert(name, model=model, config=model.config)
        return {key: value[0] if isinstance(value, list) else value for key, value in results.items()}

    try:
        traced = trace(convert, {key: tensor.shape for key, tensor in tensors.items()})
    except NotSlices:
        if not all(isinstance(operation, _MOVES_ONLY) for operation in group.converter.operations):
            raise Unloadable(
                f"{name} is made of the stored {next(iter(tensors))} by {group.converter.operations}"
            ) from None
        results = convert([torch.empty(tensor.shape, device="meta") for tensor in tensors.values()])
        converted = Converted(tensors, tuple(results), convert)
        for target, result in results.items():
            sources.converted[target] = converted
            sources.shapes[target] = tuple(result.shape)
    except (RuntimeError, ValueError, IndexError, AttributeError) as error:
        raise Unloadable(f"{name} can't be made of the stored {next(iter(tensors))}: {error}") from error
    else:
        for target, (elements, shape) in traced.items():
            sources.slices.setdefault(target, []).append(elements)
            sources.shapes[target] = shape
