"""The trained model as a Hugging Face directory, without the whole of it on any one rank.

Every stored tensor of the base comes out again: under its key, in its dtype, with the trained values in the
places that the base's were read from. So whoever loads the base loads the result. Units are gathered one
after the other, and the ranks write what they take of each straight into their files: what unit i starts is
written by rank i mod N. Written aside, synced, renamed.
"""

import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

from zero_core.checkpoints import durable
from zero_core.checkpoints.checkpoint import all_or_none
from zero_core.checkpoints.tensor_dtypes import DTYPES
from zero_core.checkpoints.tensor_file import Run, StoredTensor, TensorFile
from zero_core.engine import ZeroEngine
from zero_core.memory.tensor_bytes import bytes_of
from zero_core.sharding.unit import Unit

INDEX = "model.safetensors.index.json"

_COPIED = 1 << 24
"""Bytes that are copied at a time."""


class ConvertedTogether(Protocol):
    """Stored tensors that become parameters by more than slicing."""

    @property
    def tensors(self) -> Mapping[str, StoredTensor]: ...

    @property
    def names(self) -> tuple[str, ...]:
        """Of the parameters that they become."""
        ...

    def revert(self, parameters: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The stored tensors, by key, that become these."""
        ...


class Base(Protocol):
    """How the model is stored that the engine started from."""

    stored: Mapping[str, StoredTensor]

    def runs(self, name: str) -> Iterable[tuple[int, Run]]:
        """Where a parameter's or buffer's elements are: each run with the element that it starts at."""
        ...

    def converted(self, name: str) -> ConvertedTogether | None:
        """For a parameter without runs."""
        ...


class Results(Protocol):
    """What of a gathered unit goes into the result."""

    def names(self, unit: Unit) -> Iterable[str]:
        """What ``__call__`` gives, by the base's names. The same on every rank."""
        ...

    def __call__(self, unit: Unit, keep: bool) -> Iterable[tuple[str, Tensor]]:
        """Names and values, in any dtype, on a rank that keeps some of them. Collective."""
        ...


class Parameters:
    """Every parameter under its own name."""

    def names(self, unit: Unit) -> Iterator[str]:
        return (slot.name for flat in unit.flats for slot in flat.layout.slots)

    def __call__(self, unit: Unit, keep: bool) -> Iterator[tuple[str, Tensor]]:
        if keep:
            for flat in unit.flats:
                for slot, _, view in flat.slots():
                    yield slot.name, view.detach()


@dataclass(frozen=True)
class Exported:
    path: Path
    bytes: int


def export(
    engine: ZeroEngine,
    path: Path,
    base: Base,
    write_beside: Callable[[Path], None],
    results: Results,
) -> Exported | None:
    """Write the model to ``path``, replacing what is there. Collective; rank 0 alone gets the answer.

    ``write_beside`` is called on rank 0 with the directory, to add the config and the tokenizer.
    """
    group = engine.communicator
    aside = path.with_name(f".{path.name}.tmp")
    with all_or_none(group, "export"):
        if group.rank == 0:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
    deal = _Deal(engine, base, results)
    with all_or_none(group, "export"):
        writer = _Writer(base, deal.keys_of(group.rank), aside / _file_name(group.rank, group.world_size))
    try:
        with all_or_none(group, "export"):
            writer.copy(deal.from_base)
        for unit in engine.gathered():
            writer.take(results(unit, deal.concerns(unit, group.rank)))
        with all_or_none(group, "export"):
            writer.take(_buffers(engine).items())
            writer.finish()
    finally:
        writer.close()
    with all_or_none(group, "export"):
        if group.rank == 0:
            total = _write_index(deal, base, aside, group.world_size)
            write_beside(aside)
            durable.sync_tree(aside)
            shutil.rmtree(path, ignore_errors=True)
            aside.rename(path)
            durable.sync(path.parent)
    return Exported(path, total) if group.rank == 0 else None


def _file_name(rank: int, world_size: int) -> str:
    return f"model-{rank + 1:05d}-of-{world_size:05d}.safetensors"


def _buffers(engine: ZeroEngine) -> dict[str, Tensor]:
    """Persistent buffers, which every rank has alike."""
    persistent = set(engine.model.state_dict())
    return {n: b.detach() for n, b in engine.model.named_buffers() if n in persistent}


class _Deal:
    """Which rank writes which stored tensor; every rank knows, so nothing is asked."""

    def __init__(self, engine: ZeroEngine, base: Base, results: Results) -> None:
        world_size = engine.communicator.world_size
        self.rank_of: dict[str, int] = {}
        """By key."""
        self._units: list[set[str]] = []
        trained: Counter[str] = Counter()
        for unit in engine.units:
            counts = _elements(base, results.names(unit))
            self._units.append(set(counts))
            trained += counts
            self._claim(counts, unit.index % world_size)
        buffers = _elements(base, _buffers(engine))
        trained += buffers
        self._claim(buffers, 0)
        for index, key in enumerate(sorted(base.stored.keys() - self.rank_of.keys())):
            self.rank_of[key] = index % world_size
        self.from_base = {key for key, tensor in base.stored.items() if trained[key] < tensor.numel}
        """Tensors with elements that the model has no place for, or all."""

    def _claim(self, keys: Iterable[str], rank: int) -> None:
        for key in keys:
            self.rank_of.setdefault(key, rank)

    def keys_of(self, rank: int) -> set[str]:
        return {key for key, owner in self.rank_of.items() if owner == rank}

    def concerns(self, unit: Unit, rank: int) -> bool:
        return any(self.rank_of[key] == rank for key in self._units[unit.index])


def _elements(base: Base, names: Iterable[str]) -> Counter[str]:
    """How many elements of each stored tensor the parameters ``names`` are."""
    counts: Counter[str] = Counter()
    for name in names:
        for _, run in base.runs(name):
            counts[run.key] += run.length
        converted = base.converted(name)
        if converted is not None:
            counts |= Counter({key: tensor.numel for key, tensor in converted.tensors.items()})
    return counts


class _Writer:
    """This rank's file, if it has any tensor to write."""

    def __init__(self, base: Base, keys: set[str], path: Path) -> None:
        self._base = base
        self._keys = keys
        tensors = {key: base.stored[key] for key in keys}
        self._file = TensorFile(path, tensors) if tensors else None
        self._waiting: dict[str, Tensor] = {}
        """Parameters that are converted back together, until all of them are there."""
        self._failure: OSError | None = None

    def copy(self, keys: set[str]) -> None:
        """Tensors of ``keys`` as they are stored in the base."""
        for key in sorted(keys & self._keys):
            assert self._file is not None
            tensor = self._base.stored[key]
            step = _COPIED // tensor.item_bytes
            with tensor.path.open("rb") as source:
                source.seek(tensor.offset)
                for start in range(0, tensor.numel, step):
                    count = min(step, tensor.numel - start)
                    self._file.write(key, start, memoryview(source.read(count * tensor.item_bytes)))

    def take(self, values: Iterable[tuple[str, Tensor]]) -> None:
        """Write what is this rank's. A failure waits for ``finish``: other ranks go on gathering."""
        if self._failure is not None:
            return
        try:
            for name, value in values:
                self._take(name, value)
        except OSError as error:
            self._failure = error

    def _take(self, name: str, value: Tensor) -> None:
        flat = value.reshape(-1)
        for start, run in self._base.runs(name):
            if run.key in self._keys:
                self._write(run.key, run.start, flat[start : start + run.length])
        converted = self._base.converted(name)
        if converted is None or not self._keys & converted.tensors.keys():
            return
        self._waiting[name] = value.to("cpu", copy=True)
        if self._waiting.keys() >= set(converted.names):
            parameters = {each: self._waiting.pop(each) for each in converted.names}
            for key, tensor in converted.revert(parameters).items():
                self._write(key, 0, tensor.reshape(-1))

    def _write(self, key: str, start: int, flat: Tensor) -> None:
        assert self._file is not None
        dtype = DTYPES[self._base.stored[key].dtype]
        for part in flat.split(_COPIED // dtype.itemsize):
            # Copied, since memory that was shown to others can't be given back by the engine.
            self._file.write(key, start, bytes_of(part.to("cpu", dtype, copy=True)))
            start += part.numel()

    def finish(self) -> None:
        """Everything was given. Raises what went wrong."""
        if self._failure is not None:
            raise self._failure
        assert not self._waiting, sorted(self._waiting)
        if self._file is not None:
            # Here and not by rank 0 for all: the ranks' files go to the disk at the same time.
            self._file.sync()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _write_index(deal: _Deal, base: Base, directory: Path, world_size: int) -> int:
    """Which file has which tensor; returns the bytes of all."""
    weight_map = {key: _file_name(rank, world_size) for key, rank in sorted(deal.rank_of.items())}
    total = sum(tensor.nbytes for tensor in base.stored.values())
    durable.write_json(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    return total
