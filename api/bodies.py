"""Reading bodies, as dependencies that come after the key's: a stranger's body is never read or stored."""

import errno
import json
import math
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Annotated, Any, BinaryIO, NoReturn

from fastapi import Depends, Request
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException

from api.access import Admin, Member
from jobs.errors import InvalidRequest, StorageFull, Unprocessable

UPLOAD_FIELDS = ("file", "purpose")
LONGEST_INTEGER = 309
"""Digits."""


async def _read_object(request: Request) -> dict[str, Any]:
    """The body as one JSON object that the database can store."""
    try:
        body = json.loads(await request.body(), parse_constant=_refuse_constant, parse_int=_short_integer)
    except RecursionError as error:
        raise _bad_json("it is nested too deeply") from error
    except ValueError as error:
        raise _bad_json(str(error)) from error
    if not isinstance(body, dict):
        raise _bad_json("it must be an object")
    _refuse_unstorable(body)
    return body


async def _member_object(request: Request, caller: Member) -> dict[str, Any]:
    return await _read_object(request)


async def _admin_object(request: Request, caller: Admin) -> dict[str, Any]:
    return await _read_object(request)


MemberJson = Annotated[dict[str, Any], Depends(_member_object)]
AdminJson = Annotated[dict[str, Any], Depends(_admin_object)]


@dataclass(frozen=True)
class Upload:
    content: BinaryIO
    filename: str
    purpose: str


async def _upload(request: Request, caller: Member) -> AsyncIterator[Upload]:
    """The parts of a multipart body; its file waits in a temporary file that is closed afterwards."""
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        raise InvalidRequest("Send the file as multipart/form-data, with the parts file and purpose.")
    try:
        async with request.form(max_files=1, max_fields=8, max_part_size=2**16) as form:
            yield _checked_form(form)
    except (MultiPartException, HTTPException) as error:
        detail = error.message if isinstance(error, MultiPartException) else error.detail
        raise InvalidRequest(f"The multipart body can't be read: {detail}") from error
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise StorageFull("The server's disk is full; free some space on it and upload again.") from error


MemberUpload = Annotated[Upload, Depends(_upload, scope="function")]


def _checked_form(form: FormData) -> Upload:
    for name in form:
        if name not in UPLOAD_FIELDS:
            raise Unprocessable(
                f"{name}: there is no such field; send file and purpose", param=name, code="unknown_parameter"
            )
    file, purpose = form.get("file"), form.get("purpose")
    if not isinstance(file, UploadFile):
        raise _missing("file", "a file part of a multipart/form-data body")
    if not isinstance(purpose, str):
        raise _missing("purpose", "a field of a multipart/form-data body")
    filename = file.filename or "upload"
    if "\0" in filename or len(filename) > 255:
        raise InvalidRequest("file: its name has a NUL or is longer than 255 characters", param="file")
    return Upload(file.file, filename, purpose)


def _missing(name: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"{name}: it is required, as {what}", param=name, code="missing_required_parameter")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _short_integer(literal: str) -> int:
    """No integer beyond the range of floats: a message would print it whole."""
    if len(literal) > LONGEST_INTEGER:
        raise ValueError("a number is too large")
    return int(literal)


def _refuse_unstorable(body: dict[str, Any]) -> None:
    """PostgreSQL's text has no NUL and no lone surrogate, its JSON no infinity."""
    waiting: list[Any] = [body]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            waiting += [*value.keys(), *value.values()]
        elif isinstance(value, list):
            waiting += value
        elif isinstance(value, str) and any(c == "\0" or "\ud800" <= c <= "\udfff" for c in value):
            raise _bad_json("a string has a NUL or half of a surrogate pair")
        elif isinstance(value, float) and not math.isfinite(value):
            raise _bad_json("a number is too large")


def _bad_json(problem: str) -> InvalidRequest:
    return InvalidRequest(f"The body can't be read as JSON: {problem}", code="invalid_json")
