"""Slices of a model's weights, so that a sharded engine loads a model larger than one rank's memory.

``find_weights`` matches the weight files of a directory with an empty model, and ``WeightFiles`` hands out
any range of any parameter. Files are read and never mapped: what is read again is in the kernel's cache,
and a rank's memory holds what it asked for alone.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import reduce
from io import FileIO
from mmap import mmap
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from zero_core.checkpoints.tensor_dtypes import DTYPES
from zero_core.checkpoints.tensor_file import Run, StoredTensor
from zero_core.memory.tensor_bytes import bytes_of
from zero_core.models.conversion import Converted, Sources, Unloadable, find_sources
from zero_core.models.model_files import InvalidModel, stored_tensors
from zero_core.models.slices import SliceMap

_IN_HEAP = 1 << 16
"""Bytes up to which values are put there."""

_COMPARED = 1 << 20
"""Elements that are compared at a time."""


class WeightFiles:
    """The weights of one Hugging Face model directory, in one safetensors file or several."""

    def __init__(
        self,
        stored: Mapping[str, StoredTensor],
        slices: Mapping[str, Sequence[SliceMap]],
        converted: Mapping[str, Converted],
    ) -> None:
        """``slices`` and ``converted`` say what each parameter and persistent buffer is made of."""
        self.stored = stored
        """Every tensor of the files by its key, those that the model has no place for included."""
        self._slices = slices
        self._converted = converted
        self.bytes_read = 0
        """Bytes that ``read`` has returned."""

    def read(self, name: str, start: int, length: int) -> Tensor:
        """The elements [start, start + length) of the flattened tensor, 1-D and in the stored dtype."""
        if name in self._converted:
            converted = self._converted[name]
            whole = [self._read_stored(key) for key in converted.tensors]
            values = converted.convert(whole)[name].reshape(-1)[start : start + length].clone()
        else:
            values = self._read_runs(self._slices[name][0].take(start, length))
        self.bytes_read += values.nbytes
        return values

    def stored_dtype(self, name: str) -> torch.dtype:
        """What ``read`` gives; of a parameter stored in parts of several dtypes, what holds them all."""
        if name in self._converted:
            return _common([DTYPES[tensor.dtype] for tensor in self._converted[name].tensors.values()])
        return self._dtype_of(self._slices[name][0].runs)

    def runs(self, name: str) -> Iterator[tuple[int, Run]]:
        """Where the parameter's elements are stored: each run with the element that it starts at."""
        for elements in self._slices.get(name, ()):
            start = 0
            for run in elements.runs:
                yield start, run
                start += run.length

    def converted(self, name: str) -> Converted | None:
        """For a parameter that is stored in no runs: with what it is converted together."""
        return self._converted.get(name)

    def _read_stored(self, key: str) -> Tensor:
        tensor = self.stored[key]
        return self._read_runs([Run(key, 0, tensor.numel)]).view(tensor.shape)

    def _read_runs(self, runs: Sequence[Run]) -> Tensor:
        values = _reserve(sum(run.length for run in runs), self._dtype_of(runs))
        with ExitStack() as stack:
            files: dict[Path, FileIO] = {}
            for run, part in zip(runs, values.split([run.length for run in runs]), strict=True):
                tensor = self.stored[run.key]
                if tensor.path not in files:
                    files[tensor.path] = stack.enter_context(tensor.path.open("rb", buffering=0))
                same = DTYPES[tensor.dtype] == part.dtype
                place = part if same else torch.empty(run.length, dtype=DTYPES[tensor.dtype])
                _fill(place, files[tensor.path], tensor, run.start)
                if not same:
                    part.copy_(place)
        return values

    def _dtype_of(self, runs: Sequence[Run]) -> torch.dtype:
        return _common([DTYPES[dtype] for dtype in sorted({self.stored[run.key].dtype for run in runs})])


def _reserve(numel: int, dtype: torch.dtype) -> Tensor:
    """Memory that goes back to the system with the tensor.

    What is read is soon copied to where it stays. In the heap it would leave holes between what stays,
    which together are as large as that.
    """
    nbytes = numel * dtype.itemsize
    if nbytes < _IN_HEAP:
        return torch.empty(numel, dtype=dtype)
    return torch.frombuffer(mmap(-1, nbytes), dtype=dtype)


def _common(dtypes: list[torch.dtype]) -> torch.dtype:
    return reduce(torch.promote_types, dtypes) if len(set(dtypes)) > 1 else dtypes[0]


def _fill(place: Tensor, file: FileIO, tensor: StoredTensor, start: int) -> None:
    file.seek(tensor.offset + start * tensor.item_bytes)
    rest = bytes_of(place)
    while rest.nbytes:
        count = file.readinto(rest)
        if not count:
            raise InvalidModel(f"{tensor.path} became shorter while it was read")
        rest = rest[count:]


def find_weights(directory: Path, model: PreTrainedModel) -> WeightFiles:
    """The stored values of ``model``'s parameters. Raises InvalidModel where they don't fit.

    Each parameter goes by the name that ``named_parameters`` gives it. What the config ties is tied, as
    transformers does: unless both are stored with different values. Persistent buffers are filled at once.
    """
    stored = stored_tensors(directory)
    try:
        sources = find_sources(model, stored)
    except Unloadable as error:
        raise InvalidModel(f"{directory}: {error}") from error
    _refuse(directory, "stored with several values", _ambiguous(stored, sources))
    _tie(model, sources, WeightFiles(stored, sources.slices, sources.converted))
    aliases: dict[int, list[str]] = {}
    for name, tensor in _kept(model):
        aliases.setdefault(id(tensor), []).append(name)
    shapes = {names[0]: tuple(model.get_parameter_or_buffer(names[0]).shape) for names in aliases.values()}
    found = {names[0]: [name for name in names if name in sources] for names in aliases.values()}
    optional = re.compile("|".join(model._keys_to_ignore_on_load_missing or ["(?!)"]))
    buffers = dict(model.named_buffers())
    _refuse(
        directory,
        "missing",
        [n for n, names in found.items() if not names and not (n in buffers and optional.search(n))],
    )
    _refuse(
        directory,
        "mismatched",
        [n for n, names in found.items() if any(sources.shapes[name] != shapes[n] for name in names)],
    )
    slices = {
        n: [part for name in names for part in sources.slices.get(name, ())] for n, names in found.items()
    }
    converted = {n: sources.converted[names[0]] for n, names in found.items() if names[:1] and not slices[n]}
    files = WeightFiles(stored, {n: parts for n, parts in slices.items() if parts}, converted)
    _refuse(directory, "two parameters each", _used_twice(stored, slices))
    for name in [name for name in buffers if found.get(name)]:
        buffer = buffers[name]
        buffer.copy_(files.read(name, 0, buffer.numel()).view(buffer.shape))
    return files


def _kept(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers under all of their names, in order."""
    persistent = model.state_dict().keys()
    yield from model.named_parameters(remove_duplicate=False)
    yield from ((n, b) for n, b in model.named_buffers(remove_duplicate=False) if n in persistent)


def _ambiguous(stored: Mapping[str, StoredTensor], sources: Sources) -> list[str]:
    """Names with several stored tensors that are not equal."""
    several = {name: parts for name, parts in sources.slices.items() if len(parts) > 1}
    return [
        name
        for name, parts in several.items()
        for part in parts[1:]
        if not _equal(
            WeightFiles(stored, {"first": parts, "other": [part]}, {}), "first", "other", part.numel
        )
    ]


def _tie(model: PreTrainedModel, sources: Sources, files: WeightFiles) -> None:
    absent = {name for name in model.state_dict() if name not in sources}
    for target, source in list(model.all_tied_weights_keys.items()):
        if target in sources and source in sources:
            shape = sources.shapes[target]
            if shape == sources.shapes[source] and _equal(files, target, source, math.prod(shape)):
                absent.add(target)
            else:
                del model.all_tied_weights_keys[target]
    model.tie_weights(missing_keys=absent, recompute_mapping=False)


def _equal(files: WeightFiles, first: str, second: str, numel: int) -> bool:
    steps = [(start, min(_COMPARED, numel - start)) for start in range(0, numel, _COMPARED)]
    return all(torch.equal(files.read(first, *step), files.read(second, *step)) for step in steps)


def _used_twice(stored: Mapping[str, StoredTensor], slices: Mapping[str, Sequence[SliceMap]]) -> list[str]:
    """Stored tensors with elements that would be trained as several and stored as one."""
    used: Counter[str] = Counter()
    for run in (run for parts in slices.values() for part in parts for run in part.runs):
        used[run.key] += run.length
    return [key for key, count in used.items() if count > stored[key].numel]


def _refuse(directory: Path, problem: str, names: list[str]) -> None:
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise InvalidModel(
            f"{directory}: weights do not fit its config ({problem}: {', '.join(names[:3])}{more})"
        )
