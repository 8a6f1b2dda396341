"""The trained model as a Hugging Face directory, without the whole of it on any one rank.

Units are gathered one after the other; unit i is kept and written by rank i mod N, so a rank holds about
Ψ/N beside the unit in hand. Written aside, synced, renamed.
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
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


def export(
    engine: ZeroEngine, path: Path, dtype: torch.dtype, write_beside: Callable[[Path], None]
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
        if unit.index % group.world_size == group.rank:
            weights |= _weights(unit, dtype)
    if group.rank == 0:
        weights |= _buffers(engine)
    with all_or_none(group, "export"):
        if weights:
            save_file(weights, aside / _file_name(group.rank, group.world_size), metadata={"format": "pt"})
    with all_or_none(group, "export"):
        if group.rank == 0:
            total = _write_index(engine, aside, dtype)
            write_beside(aside)
            durable.sync_tree(aside)
            shutil.rmtree(path, ignore_errors=True)
            aside.rename(path)
            durable.sync(path.parent)
    return Exported(path, total) if group.rank == 0 else None


def _file_name(rank: int, world_size: int) -> str:
    return f"model-{rank + 1:05d}-of-{world_size:05d}.safetensors"


def _weights(unit: Unit, dtype: torch.dtype) -> dict[str, Tensor]:
    return {
        slot.name: view.detach().to("cpu", dtype, copy=True)
        for flat in unit.flats
        for slot, _, view in flat.slots()
    }


def _buffers(engine: ZeroEngine) -> dict[str, Tensor]:
    """Persistent buffers, which every rank has alike."""
    persistent = set(engine.model.state_dict())
    return {n: b.detach().cpu().clone() for n, b in engine.model.named_buffers() if n in persistent}


def _write_index(engine: ZeroEngine, directory: Path, dtype: torch.dtype) -> int:
    """Which file has which tensor; every rank knows, so nothing is asked."""
    world_size = engine.communicator.world_size
    weight_map: dict[str, str] = {}
    total = 0
    for index, unit in enumerate(engine.units):
        for flat in unit.flats:
            for slot in flat.layout.slots:
                weight_map[slot.name] = _file_name(index % world_size, world_size)
                total += slot.numel * dtype.itemsize
    for name, buffer in _buffers(engine).items():
        weight_map[name] = _file_name(0, world_size)
        total += buffer.nbytes
    durable.write_json(
        directory / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    )
    return total
