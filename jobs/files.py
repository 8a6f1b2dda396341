"""Uploaded and produced files: a row, and the bytes under ``files/<id>`` in the data directory.

Names that users give are only ever shown; the path comes from the generated id.
"""

import errno
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from sqlalchemy import func, or_, select
from sqlalchemy.orm import Session

from jobs.errors import Conflict, InvalidRequest, NotFound, StorageFull, TooLarge
from jobs.ids import new_id
from jobs.pages import Page, page
from jobs.settings import Settings
from jobs.state import TERMINAL
from jobs.tables import File, Job
from zero_core.data.formats import validate_file

CHUNK = 2**20
UPLOADED = "fine-tune"
"""The purpose that users upload with."""

RESULTS = "fine-tune-results"


@dataclass(frozen=True)
class StoredUpload:
    """Bytes on disk that no row names yet."""

    id: str
    filename: str
    purpose: str
    bytes: int
    sha256: str
    examples: int | None = None
    """Good lines, where it is a training file."""
    format: str | None = None
    warnings: tuple[str, ...] = ()
    """What of the file is not used."""
    error: str | None = None
    """Why the file can't be trained on; the upload itself succeeds, as OpenAI's does."""


def file_path(settings: Settings, file_id: str) -> Path:
    return settings.files_dir / file_id


# Storing: no transaction is open meanwhile.


def store_upload(settings: Settings, source: BinaryIO, filename: str, purpose: str) -> StoredUpload:
    """Write an upload to disk and check its format. Nothing stays behind when it fails."""
    if purpose != UPLOADED:
        raise InvalidRequest(
            f"purpose: {purpose!r} is not supported; upload training files with {UPLOADED!r}", param="purpose"
        )
    with _aside(settings) as (file_id, path):
        size, digest = _write(settings, source, path)
        if size == 0:
            raise InvalidRequest("file: it is empty; upload JSON lines", param="file")
        report = validate_file(path)
        _publish(path, file_path(settings, file_id))
    error = report.summary if report.error_count else None
    return StoredUpload(
        file_id, filename, purpose, size, digest, report.examples, report.format, report.warnings, error
    )


def store_produced(settings: Settings, content: bytes, filename: str, purpose: str) -> StoredUpload:
    """Write a file that the service made."""
    with _aside(settings) as (file_id, path):
        path.write_bytes(content)
        _publish(path, file_path(settings, file_id))
    return StoredUpload(file_id, filename, purpose, len(content), hashlib.sha256(content).hexdigest())


@contextmanager
def _aside(settings: Settings) -> Iterator[tuple[str, Path]]:
    """An id and a place to write its bytes, which is gone afterwards unless it was renamed."""
    settings.files_dir.mkdir(parents=True, exist_ok=True)
    file_id = new_id("file-")
    path = settings.files_dir / f".{file_id}.tmp"
    try:
        yield file_id, path
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise StorageFull("The server's disk is full; free some space on it and upload again.") from error
    finally:
        path.unlink(missing_ok=True)


def _write(settings: Settings, source: BinaryIO, path: Path) -> tuple[int, str]:
    """Copy ``source`` to ``path`` within the limits; its size and sha256."""
    size, digest = 0, hashlib.sha256()
    with path.open("xb") as target:
        while chunk := source.read(CHUNK):
            size += len(chunk)
            if size > settings.max_upload_bytes:
                raise TooLarge(
                    f"file: it is larger than {settings.max_upload_bytes:,} bytes, this server's limit",
                    param="file",
                )
            if shutil.disk_usage(path.parent).free - len(chunk) < settings.min_free_bytes:
                raise StorageFull(
                    f"The server's disk has less than {settings.min_free_bytes:,} bytes left; "
                    "free some space on it and upload again."
                )
            target.write(chunk)
            digest.update(chunk)
        target.flush()
        os.fsync(target.fileno())
    return size, digest.hexdigest()


def _publish(aside: Path, path: Path) -> None:
    aside.rename(path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


# The record.


def record_file(session: Session, team_id: str, stored: StoredUpload) -> File:
    file = File(
        id=stored.id,
        team_id=team_id,
        filename=stored.filename,
        purpose=stored.purpose,
        bytes=stored.bytes,
        sha256=stored.sha256,
        status="error" if stored.error else "processed",
        status_details=stored.error,
        examples=stored.examples,
        format=stored.format,
        warnings=list(stored.warnings),
    )
    session.add(file)
    session.flush()
    session.refresh(file)
    return file


def get_file(session: Session, team_id: str, file_id: str, param: str = "file_id") -> File:
    file = session.get(File, file_id)
    if file is None or file.team_id != team_id or file.deleted_at is not None:
        raise NotFound(f"No such File object: {file_id}", param=param)
    return file


def list_files(
    session: Session,
    team_id: str,
    after: str | None = None,
    limit: int = 10_000,
    purpose: str | None = None,
    order: str = "desc",
) -> Page[File]:
    query = select(File).where(File.team_id == team_id, File.deleted_at.is_(None))
    if purpose is not None:
        query = query.where(File.purpose == purpose)
    keys = (File.created_at, File.id)
    return page(session, query, keys, after=after, limit=limit, ascending=order == "asc")


def delete_file(session: Session, team_id: str, file_id: str) -> None:
    """The row stays, for the jobs that name it; its bytes may go once this has committed."""
    session.execute(select(File.id).where(File.id == file_id).with_for_update())
    file = get_file(session, team_id, file_id)
    user = session.scalar(
        select(Job.id).where(
            or_(Job.training_file == file.id, Job.validation_file == file.id), Job.state.not_in(TERMINAL)
        )
    )
    if user is not None:
        raise Conflict(
            f"File {file_id} is used by job {user}, which has not ended; cancel the job or wait for it."
        )
    file.deleted_at = func.now()
    session.flush()


def remove_bytes(settings: Settings, file_id: str) -> None:
    """Of a file whose deletion has committed."""
    file_path(settings, file_id).unlink(missing_ok=True)
