"""The trained model as a Hugging Face directory, without the whole of it on any one rank.

Units are gathered one after the other; unit i is kept and written by rank i mod N, so a rank holds about
Ψ/N beside the unit in hand. Written aside, synced, renamed.
"""

import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from zero_core.checkpoints import durable
from zero_core.checkpoints.checkpoint import all_or_none
from zero_core.engine import ZeroEngine
from zero_core.sharding.unit import Unit

INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Exported:
    path: Path
    bytes: int


class Results(Protocol):
    """What of a gathered unit goes into the result."""

    def __call__(self, unit: Unit, keep: bool) -> Iterable[tuple[str, Tensor]]:
        """Names and values, in any dtype, on the one rank that keeps them. Collective."""
        ...


def parameters(unit: Unit, keep: bool) -> Iterable[tuple[str, Tensor]]:
    """Every parameter under its own name."""
    if keep:
        for flat in unit.flats:
            for slot, _, view in flat.slots():
                yield slot.name, view.detach()


def export(
    engine: ZeroEngine,
    path: Path,
    dtype: torch.dtype,
    write_beside: Callable[[Path], None],
    results: Results = parameters,
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
    weights: dict[str, Tensor] = {}
    for unit in engine.gathered():
        keep = unit.index % group.world_size == group.rank
        weights |= {name: value.to("cpu", dtype, copy=True) for name, value in results(unit, keep)}
    if group.rank == 0:
        weights |= _buffers(engine)
    with all_or_none(group, "export"):
        if weights:
            save_file(weights, aside / _file_name(group.rank, group.world_size), metadata={"format": "pt"})
    with all_or_none(group, "export"):
        if group.rank == 0:
            total = _write_index(aside)
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
    return {n: b.detach().cpu().clone() for n, b in engine.model.named_buffers() if n in persistent}


def _write_index(directory: Path) -> int:
    """Which file has which tensor; returns the bytes of all."""
    weight_map: dict[str, str] = {}
    total = 0
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                weight_map[name] = path.name
                # Mapped, not read.
                total += tensors.get_tensor(name).nbytes
    durable.write_json(
        directory / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    )
    return total
