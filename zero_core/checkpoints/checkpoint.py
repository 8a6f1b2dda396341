"""Save and load a run: sharded, atomic, checked, without pickle.

Every rank writes the pieces of its own shard, whatever the stage, so N ranks write each element once.
Order: a directory aside; all files, synced; a barrier; the manifest; the rename; the parent synced.
A rank that fails makes all give up before the manifest exists.
"""

import json
import shutil
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from zero_core.checkpoints import durable
from zero_core.checkpoints.manifest import Manifest, StoredFile, StoredPiece
from zero_core.checkpoints.tensor_dtypes import DTYPES
from zero_core.checkpoints.tensor_file import StoredTensor, TensorFile
from zero_core.comm.collectives import Communicator
from zero_core.engine import ZeroEngine
from zero_core.errors import CheckpointDamaged, CheckpointMismatch, EngineError, PeerFailed
from zero_core.memory.tensor_bytes import bytes_of
from zero_core.sharding.layout import Layout, Piece
from zero_core.sharding.update import Owned

BUFFERS = "buffers.safetensors"

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Saved:
    path: Path
    manifest_sha256: str
    bytes: int


# Saving.


def save(engine: ZeroEngine, path: Path, state: dict[str, Any]) -> Saved | None:
    """Write a checkpoint to ``path``, which must not exist. Collective; rank 0 alone gets the answer."""
    group = engine.communicator
    engine.forget_quantization_error()
    aside = path.with_name(f".{path.name}.tmp")
    with all_or_none(group, f"checkpoint {path.name}"):
        if group.rank == 0:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
    with all_or_none(group, f"checkpoint {path.name}"):
        _write_shard(engine, aside)
        if group.rank == 0:
            _write_buffers(engine, aside)
    saved = None
    with all_or_none(group, f"checkpoint {path.name}"):
        if group.rank == 0:
            manifest = _merge(engine, aside, state)
            digest = manifest.write(aside)
            aside.rename(path)
            durable.sync(path.parent)
            saved = Saved(path, digest, manifest.bytes)
    return saved


class all_or_none:
    """A block that every rank runs: if it fails on one, it fails on all, and no rank waits for ever.

    A rank on which it went well raises ``verdict``.
    """

    def __init__(self, group: Communicator, what: str, verdict: type[EngineError] = PeerFailed) -> None:
        self._group = group
        self._what = what
        self._verdict = verdict

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        failed = torch.zeros(self._group.world_size)
        failed[self._group.rank] = error is not None
        failed = self._group.agree(failed)
        if error is None and failed.any():
            raise self._verdict(f"{self._what}: rank {int(failed.argmax())} failed; its log has the cause")


def _shard_part(engine: ZeroEngine, piece: Piece, layout: Layout) -> Piece | None:
    """What of an owned piece lies in this rank's shard: all of it where state is sharded."""
    mesh = engine.communicator.mesh
    if mesh.replica > 0:
        return None
    flat_begin, flat_end = layout.shard_range(engine.communicator.shard_index)
    first = max(piece.offset, flat_begin)
    last = min(piece.offset + piece.length, flat_end)
    if first >= last:
        return None
    return Piece(piece.slot, first - piece.slot.offset, last - first)


def _write_shard(engine: ZeroEngine, directory: Path) -> None:
    """One file; of what the optimizer holds no more is in memory than one update brings."""
    rank = engine.communicator.rank
    name = f"rank-{rank:05d}.safetensors"
    path = directory / name
    small = {f"rng/{device}": state for device, state in _rng_states(engine).items()}
    pieces: dict[str, StoredPiece] = {}
    states: dict[str, list[str]] = {}
    for described in engine.optimizer.described():
        part = _shard_part(engine, described.piece, described.layout)
        if part is None:
            continue
        parameter = part.slot.name
        # Pieces of one parameter follow each other.
        first = pieces.get(parameter, StoredPiece(name, part.start, 0))
        pieces[parameter] = StoredPiece(name, first.start, first.length + part.length)
        states[parameter] = ["master", *described.full_length]
        small |= {f"{parameter}/{key}": value for key, value in described.scalars.items()}
    tensors = {
        f"{parameter}/{key}": StoredTensor(path, "F32", (pieces[parameter].length,), 0)
        for parameter, keys in states.items()
        for key in keys
    }
    tensors |= {
        key: StoredTensor(path, _NAMES[value.dtype], tuple(value.shape), 0) for key, value in small.items()
    }
    with TensorFile(path, tensors) as file:
        for key, value in small.items():
            file.write(key, 0, bytes_of(value.reshape(-1).cpu()))
        for owned in engine.optimizer.owned():
            part = _shard_part(engine, owned.piece, owned.layout)
            if part is None:
                continue
            begin = part.start - owned.piece.start
            values = {"master": owned.master} | {k: v for k, v in owned.state.items() if v.dim()}
            for key, value in values.items():
                parameter = part.slot.name
                mine = value[begin : begin + part.length].cpu()
                file.write(f"{parameter}/{key}", part.start - pieces[parameter].start, bytes_of(mine))
        file.sync()
    _describe(path)
    sidecar = {"pieces": {parameter: asdict(piece) for parameter, piece in pieces.items()}}
    durable.write_json(directory / f"rank-{rank:05d}.json", sidecar)


def _write_buffers(engine: ZeroEngine, directory: Path) -> None:
    persistent = set(engine.model.state_dict()) if any(True for _ in engine.model.buffers()) else set()
    buffers = {n: b.contiguous() for n, b in engine.model.named_buffers() if n in persistent}
    save_file(buffers, directory / BUFFERS)
    durable.sync(directory / BUFFERS)
    _describe(directory / BUFFERS)


def _describe(path: Path) -> None:
    """Write a sidecar of the file's size and sha256 for the manifest."""
    described = StoredFile(path.stat().st_size, durable.sha256_of(path))
    durable.write_json(path.with_suffix(".sum.json"), asdict(described))


def _merge(engine: ZeroEngine, directory: Path, state: dict[str, Any]) -> Manifest:
    """One manifest from the ranks' sidecars, which go."""
    files: dict[str, StoredFile] = {}
    for path in sorted(directory.glob("*.safetensors")):
        sidecar = path.with_suffix(".sum.json")
        files[path.name] = StoredFile(**json.loads(sidecar.read_bytes()))
        sidecar.unlink()
    pieces: dict[str, list[StoredPiece]] = {}
    for path in sorted(directory.glob("rank-*.json")):
        for parameter, piece in json.loads(path.read_bytes())["pieces"].items():
            pieces.setdefault(parameter, []).append(StoredPiece(**piece))
        path.unlink()
    return Manifest(
        step=engine.steps,
        world_size=engine.communicator.world_size,
        stage=engine.config.stage,
        precision=engine.config.precision,
        shapes=_shapes(engine),
        pieces=pieces,
        files=files,
        state=state,
        scaler=engine.scaler.state() if engine.scaler else None,
    )


def _shapes(engine: ZeroEngine) -> dict[str, list[int]]:
    """Of every trainable parameter."""
    return {
        slot.name: list(slot.shape)
        for unit in engine.units
        for flat in unit.trainable_flats
        for slot in flat.layout.slots
    }


def _rng_states(engine: ZeroEngine) -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if engine.device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(engine.device)
    return states


# Loading.


def load(engine: ZeroEngine, path: Path) -> dict[str, Any]:
    """Put a checkpoint's weights, optimizer state and step into ``engine``; return the loop's state.

    Any stage, number of ranks and precision reads any checkpoint of the same model. Nothing of the engine
    changes before the whole checkpoint has been verified. Collective.
    """
    group = engine.communicator
    with all_or_none(group, f"checkpoint {path.name}", CheckpointDamaged):
        manifest = Manifest.read(path)
        _check_model(engine, manifest)
        mine = sorted(manifest.files)[group.rank :: group.world_size]
        manifest.verify(path, mine)
    with all_or_none(group, f"checkpoint {path.name}", CheckpointDamaged):
        _read_pieces(engine, path, manifest)
        _read_buffers(engine, path)
        _read_rng(engine, path, manifest)
    engine.steps = manifest.step
    if engine.scaler and manifest.scaler:
        engine.scaler.restore(manifest.scaler)
    engine.forget_quantization_error()
    engine.refresh_parameters()
    engine.start_measuring()
    return manifest.state


def _check_model(engine: ZeroEngine, manifest: Manifest) -> None:
    ours = _shapes(engine)
    if ours == manifest.shapes:
        return
    differing = sorted(
        name for name in ours.keys() | manifest.shapes.keys() if ours.get(name) != manifest.shapes.get(name)
    )
    name = differing[0]
    raise CheckpointMismatch(
        f"the checkpoint is of another model: {name} has shape {manifest.shapes.get(name, 'none')} there "
        f"and {ours.get(name, 'none')} here ({len(differing)} parameters differ)"
    )


def _read_pieces(engine: ZeroEngine, path: Path, manifest: Manifest) -> None:
    for described in engine.optimizer.described():
        name, wanted = described.piece.slot.name, described.piece
        parts = manifest.overlapping(name, wanted.start, wanted.length)
        if sum(last - first for _, first, last in parts) != wanted.length:
            raise CheckpointDamaged(f"{path}: elements of {name} are missing")
    with ExitStack() as stack:
        files: dict[str, _PiecesFile] = {}
        for owned in engine.optimizer.owned(restore=True):
            owned.state.clear()
            for piece, first, last in manifest.overlapping(
                owned.piece.slot.name, owned.piece.start, owned.piece.length
            ):
                if piece.file not in files:
                    files[piece.file] = _PiecesFile.open(path / piece.file, stack)
                files[piece.file].read(owned, piece, first, last)


@dataclass(frozen=True)
class _PiecesFile:
    """One rank's file of a checkpoint."""

    tensors: Any
    keys: dict[str, list[str]]
    """By parameter, what it has of its optimizer state; nothing before its first update."""

    @classmethod
    def open(cls, path: Path, stack: ExitStack) -> "_PiecesFile":
        try:
            tensors = stack.enter_context(safe_open(path, framework="pt"))
        except SafetensorError as error:
            raise CheckpointDamaged(f"{path} can't be read: {error}") from error
        keys: dict[str, list[str]] = {}
        for name in tensors.keys():  # noqa: SIM118
            parameter, _, key = name.rpartition("/")
            if key != "master":
                keys.setdefault(parameter, []).append(key)
        return cls(tensors, keys)

    def read(self, owned: Owned, piece: StoredPiece, first: int, last: int) -> None:
        """Elements [first, last) of the parameter, and its 0-dim state."""
        name = owned.piece.slot.name
        here = slice(first - owned.piece.start, last - owned.piece.start)
        there = slice(first - piece.start, last - piece.start)
        owned.master[here].copy_(self.tensors.get_slice(f"{name}/master")[there])
        for key in self.keys.get(name, []):
            stored = self.tensors.get_slice(f"{name}/{key}")
            if not stored.get_shape():
                # What is read maps the file: pieces of one parameter would count their steps together.
                owned.state[key] = self.tensors.get_tensor(f"{name}/{key}").clone()
                continue
            if key not in owned.state:
                owned.state[key] = torch.zeros_like(owned.master)
            owned.state[key][here].copy_(stored[there])


def _read_buffers(engine: ZeroEngine, path: Path) -> None:
    stored = load_file(path / BUFFERS)
    for name, buffer in engine.model.named_buffers():
        if name in stored:
            buffer.copy_(stored[name])


def _read_rng(engine: ZeroEngine, path: Path, manifest: Manifest) -> None:
    """Each rank's random state, where the number of ranks is the same; else it has no meaning."""
    if manifest.world_size != engine.communicator.world_size:
        return
    name = f"rank-{engine.communicator.rank:05d}.safetensors"
    with safe_open(path / name, framework="pt") as tensors:
        torch.set_rng_state(tensors.get_tensor("rng/cpu"))
        if engine.device.type == "cuda" and "rng/cuda" in tensors.keys():  # noqa: SIM118
            torch.cuda.set_rng_state(tensors.get_tensor("rng/cuda"), engine.device)
