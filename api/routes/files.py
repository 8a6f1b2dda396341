"""Files: upload, list, show, read, delete."""

import base64
from typing import Annotated, Literal

from fastapi import APIRouter, Form, Query, Response, UploadFile
from fastapi.responses import FileResponse

from api.access import Member, Reader
from api.parameters import After
from api.views import View, file_view, listing
from jobs import files
from jobs.database import sessions
from jobs.files import RESULTS, file_path, store_upload
from jobs.settings import settings

router = APIRouter(prefix="/v1/files", tags=["files"])


@router.post("")
def upload(caller: Member, file: UploadFile, purpose: Annotated[str, Form()]) -> View:
    """Upload a training file of JSON lines. A file with errors is kept, with ``status`` ``error``."""
    stored = store_upload(settings(), file.file, file.filename or "upload", purpose)
    with sessions().begin() as session:
        return file_view(files.record_file(session, caller.team_id, stored))


@router.get("")
def list_files(
    caller: Reader,
    after: After = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
    purpose: str | None = None,
    order: Literal["asc", "desc"] = "desc",
) -> View:
    with sessions().begin() as session:
        page = files.list_files(session, caller.team_id, after, limit, purpose, order)
        return listing(page, [file_view(file) for file in page.data])


@router.get("/{file_id}")
def show(caller: Reader, file_id: str) -> View:
    with sessions().begin() as session:
        return file_view(files.get_file(session, caller.team_id, file_id))


@router.get("/{file_id}/content", response_class=Response)
def content(caller: Reader, file_id: str, encoding: Literal["base64"] | None = None) -> Response:
    """The bytes; with ``encoding=base64``, for clients that decode results files themselves."""
    with sessions().begin() as session:
        file = files.get_file(session, caller.team_id, file_id)
    path = file_path(settings(), file.id)
    media_type = "text/csv" if file.purpose == RESULTS else "application/jsonl"
    if encoding == "base64":
        return Response(base64.b64encode(path.read_bytes()), media_type="text/plain")
    return FileResponse(path, media_type=media_type, filename=file.filename)


@router.delete("/{file_id}")
def delete(caller: Member, file_id: str) -> View:
    with sessions().begin() as session:
        files.delete_file(session, settings(), caller.team_id, file_id)
    return {"id": file_id, "object": "file", "deleted": True}
