"""What a checkpoint says of itself: ``manifest.json``, written last, so its presence means complete.

A parameter is described by pieces: elements [start, start + length) of the flattened tensor lie in one
file under ``<parameter>/master`` and ``<parameter>/<optimizer state>``. Nothing depends on the stage or
the number of ranks that wrote it, so any plan reads the elements that it needs and no others.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from zero_core.checkpoints import durable
from zero_core.config.zero import Precision
from zero_core.errors import CheckpointDamaged

NAME = "manifest.json"
FORMAT = "shardyard-checkpoint-1"


@dataclass(frozen=True)
class StoredPiece:
    file: str
    start: int
    length: int


@dataclass(frozen=True)
class StoredFile:
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    step: int
    world_size: int
    stage: int
    precision: Precision
    shapes: dict[str, list[int]]
    pieces: dict[str, list[StoredPiece]]
    files: dict[str, StoredFile]
    state: dict[str, Any]
    """What the training loop needs to go on: the sample cursor and whatever it adds."""
    scaler: dict[str, float] | None = None
    """Of fp16's loss scale."""

    def write(self, directory: Path) -> str:
        return durable.write_json(directory / NAME, {"format": FORMAT, **asdict(self)})

    @classmethod
    def read(cls, directory: Path) -> "Manifest":
        path = directory / NAME
        try:
            stored = json.loads(path.read_bytes())
            if stored.pop("format") != FORMAT:
                raise CheckpointDamaged(f"{path} is not of format {FORMAT}")
            stored["pieces"] = {
                name: [StoredPiece(**piece) for piece in pieces] for name, pieces in stored["pieces"].items()
            }
            stored["files"] = {name: StoredFile(**file) for name, file in stored["files"].items()}
            return cls(**stored)
        except FileNotFoundError:
            raise CheckpointDamaged(f"{directory} has no {NAME}: it was never completed") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointDamaged(f"{path} can't be read: {error}") from error

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files.values())

    def verify(self, directory: Path, names: list[str]) -> None:
        """Check size and sha256 of the named files."""
        for name in names:
            path, expected = directory / name, self.files[name]
            if not path.is_file():
                raise CheckpointDamaged(f"{path} is missing")
            if path.stat().st_size != expected.bytes:
                raise CheckpointDamaged(
                    f"{path} has {path.stat().st_size} bytes; {expected.bytes} were written"
                )
            if durable.sha256_of(path) != expected.sha256:
                raise CheckpointDamaged(f"{path} was altered: its sha256 is not the manifest's")

    def overlapping(self, name: str, start: int, length: int) -> Iterator[tuple[StoredPiece, int, int]]:
        """The stored pieces that hold elements [start, start + length), each with the part in question."""
        for piece in self.pieces[name]:
            first = max(start, piece.start)
            last = min(start + length, piece.start + piece.length)
            if first < last:
                yield piece, first, last
