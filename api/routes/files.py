"""Files: upload, list, show, read, delete."""

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Response
from fastapi.responses import FileResponse, StreamingResponse

from api.access import Member, Reader
from api.bodies import MemberUpload
from api.document import upload_body
from api.parameters import After
from api.schemas.files import FileObject
from api.schemas.lists import Deleted, List
from jobs import files
from jobs.database import sessions
from jobs.files import RESULTS, file_path, store_upload
from jobs.settings import settings

router = APIRouter(prefix="/v1/files", tags=["files"])

BLOCK = 3 * 2**16
"""Bytes encoded at a time; a multiple of three, so that no padding falls in between."""


@router.post("", openapi_extra=upload_body())
def upload(caller: Member, sent: MemberUpload) -> FileObject:
    """Upload a training file of JSON lines. A file with errors is kept, with ``status`` ``error``."""
    stored = store_upload(settings(), sent.content, sent.filename, sent.purpose)
    with sessions().begin() as session:
        return FileObject.model_validate(files.record_file(session, caller.team_id, stored))


@router.get("")
def list_files(
    caller: Reader,
    after: After = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
    purpose: Annotated[str | None, Query(max_length=64)] = None,
    order: Literal["asc", "desc"] = "desc",
) -> List[FileObject]:
    with sessions().begin() as session:
        page = files.list_files(session, caller.team_id, after, limit, purpose, order)
    return List(data=[FileObject.model_validate(file) for file in page.data], has_more=page.has_more)


@router.get("/{file_id}")
def show(caller: Reader, file_id: str) -> FileObject:
    with sessions().begin() as session:
        return FileObject.model_validate(files.get_file(session, caller.team_id, file_id))


@router.get("/{file_id}/content", response_class=Response)
def content(caller: Reader, file_id: str, encoding: Literal["base64"] | None = None) -> Response:
    """The bytes; with ``encoding=base64``, for clients that decode results files themselves."""
    with sessions().begin() as session:
        file = files.get_file(session, caller.team_id, file_id)
    path = file_path(settings(), file.id)
    if encoding == "base64":
        return StreamingResponse(_in_base64(path), media_type="text/plain")
    media_type = "text/csv" if file.purpose == RESULTS else "application/jsonl"
    return FileResponse(path, media_type=media_type, filename=file.filename)


@router.delete("/{file_id}")
def delete(caller: Member, file_id: str) -> Deleted:
    with sessions().begin() as session:
        files.delete_file(session, caller.team_id, file_id)
    files.remove_bytes(settings(), file_id)
    return Deleted(id=file_id, object="file")


def _in_base64(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            yield base64.b64encode(block)
