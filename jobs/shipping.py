"""Copying a run directory's lines into the database, each exactly once.

How far a file has been copied is a byte offset that moves in the same transaction as the rows, so a crash
between reading and committing repeats the reading and never a row. Files are read outside the transaction:

    offsets = shipping.offsets(session, job_id, epoch)
    chunks = shipping.read(attempt_dir, offsets)
    shipping.ship(session, job_id, epoch, chunks)
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError
from sqlalchemy import select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from jobs.attempts import hold, record_event
from jobs.recording import record_line, record_telemetry
from jobs.run_lines import EVENT_LINES, RANK_LINES, EventLine, RankLine
from jobs.tables import Job, ShippedFile

CHUNK_BYTES = 256 * 2**10
"""Most that is read of one file at once: it bounds the transaction, and the longest line there may be."""

_EVENTS = "events.jsonl"
_RANK_FILE = re.compile(r"rank-(\d{1,6})\.jsonl")


@dataclass(frozen=True)
class Chunk:
    """Whole lines of one file, from byte ``start`` up to byte ``end``."""

    name: str
    start: int
    end: int
    lines: tuple[bytes, ...]


def offsets(session: Session, job_id: str, epoch: int) -> dict[str, int]:
    """How far each of the attempt's files has been shipped."""
    rows = session.scalars(
        select(ShippedFile).where(ShippedFile.job_id == job_id, ShippedFile.epoch == epoch)
    )
    return {row.name: row.offset for row in rows}


def read(attempt_dir: Path, offsets: Mapping[str, int]) -> list[Chunk]:
    """The next whole lines of each file: events first, then ranks in order. Empty when all is shipped."""
    chunks = [_read_chunk(attempt_dir / name, offsets.get(name, 0)) for name in _file_names(attempt_dir)]
    return [chunk for chunk in chunks if chunk is not None]


def ship(session: Session, job_id: str, epoch: int, chunks: list[Chunk]) -> None:
    """Write the chunks' rows and move the offsets. Raises Fenced. A chunk shipped before is ignored."""
    job = hold(session, job_id, epoch)
    shipped = offsets(session, job_id, epoch)
    for chunk in chunks:
        if shipped.get(chunk.name, 0) != chunk.start:
            continue
        if chunk.name == _EVENTS:
            _ship_events(session, job, chunk)
        else:
            _ship_telemetry(session, job, chunk)
        moved = insert(ShippedFile).values(job_id=job_id, epoch=epoch, name=chunk.name, offset=chunk.end)
        session.execute(
            moved.on_conflict_do_update(
                index_elements=["job_id", "epoch", "name"], set_={"offset": moved.excluded.offset}
            )
        )


def _file_names(attempt_dir: Path) -> list[str]:
    ranks = sorted(
        (int(match[1]), match[0])
        for path in attempt_dir.iterdir()
        if (match := _RANK_FILE.fullmatch(path.name))
    )
    events = [_EVENTS] if (attempt_dir / _EVENTS).exists() else []
    return events + [name for _, name in ranks]


def _read_chunk(path: Path, start: int) -> Chunk | None:
    with path.open("rb") as file:
        file.seek(start)
        data = file.read(CHUNK_BYTES)
    length = data.rfind(b"\n") + 1
    if length == 0:
        if len(data) < CHUNK_BYTES:
            return None
        # A line longer than any that the engine writes: passed over piece by piece, never waited for.
        length = len(data)
    return Chunk(path.name, start, start + length, tuple(data[:length].removesuffix(b"\n").split(b"\n")))


def _ship_events(session: Session, job: Job, chunk: Chunk) -> None:
    for number, line in enumerate(chunk.lines):
        try:
            parsed: EventLine = EVENT_LINES.validate_json(line)
        except ValidationError as error:
            _warn(session, job, chunk, number, error)
        else:
            record_line(session, job, parsed)


def _ship_telemetry(session: Session, job: Job, chunk: Chunk) -> None:
    match = _RANK_FILE.fullmatch(chunk.name)
    assert match is not None
    parsed: list[RankLine] = []
    for number, line in enumerate(chunk.lines):
        try:
            parsed.append(RANK_LINES.validate_json(line))
        except ValidationError as error:
            _warn(session, job, chunk, number, error)
    record_telemetry(session, job, int(match[1]), parsed)


def _warn(session: Session, job: Job, chunk: Chunk, number: int, error: ValidationError) -> None:
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    where = ".".join(map(str, first["loc"]))
    message = (
        f"Skipped a malformed line of {chunk.name} (line {number + 1} after byte {chunk.start}): "
        f"{where + ': ' if where else ''}{first['msg']}"
    )
    record_event(session, job, message, "warn")
