"""Every answer that is not a success, in OpenAI's shape: the one place that knows HTTP statuses."""

import logging
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from sqlalchemy.exc import DataError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolExhausted
from starlette.exceptions import HTTPException

from api.schemas.errors import ErrorBody, ErrorDetail
from jobs import errors
from jobs.errors import ShardyardError

log = logging.getLogger(__name__)

STATUS: dict[type[ShardyardError], int] = {
    errors.InvalidRequest: 400,
    errors.Unauthenticated: 401,
    errors.Forbidden: 403,
    errors.NotFound: 404,
    errors.Conflict: 409,
    errors.TooLarge: 413,
    errors.Unprocessable: 422,
    errors.StorageFull: 507,
}

TYPES: dict[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
}
"""OpenAI's ``type`` where it is more than "your request is wrong" or "we are"."""

HTTP_CODES = {404: "not_found", 405: "method_not_allowed", 413: "too_large"}


def error_response(
    status: int,
    message: str,
    *,
    code: str | None = None,
    param: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    detail = ErrorDetail(message=message, type=kind, param=param, code=code)
    return JSONResponse(ErrorBody(error=detail).model_dump(), status, headers=dict(headers or {}))


def install(app: FastAPI) -> None:
    app.add_exception_handler(ShardyardError, _domain)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(DataError, _unstorable)
    app.add_exception_handler(OperationalError, _database_down)
    app.add_exception_handler(PoolExhausted, _database_down)
    app.add_exception_handler(Exception, _crash)


def _domain(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ShardyardError)
    status = STATUS[type(error)]
    # The SDK retries a 409 by itself, which can't help where the state does not allow something.
    headers = {"x-should-retry": "false"} if status in (409, 507) else {}
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return error_response(status, error.message, code=error.code, param=error.param, headers=headers)


def _invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    problem: dict[str, Any] = error.errors()[0]
    # The first part says where: query, path, form or body.
    param = ".".join(str(part) for part in problem["loc"][1:]) or None
    code = "missing_required_parameter" if problem["type"] == "missing" else "invalid_value"
    return error_response(400, f"{param or 'body'}: {problem['msg']}", code=code, param=param)


def _http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    message = error.detail
    if error.status_code == 404:
        message = f"Unknown request URL: {request.method} {request.url.path}"
    elif error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        message = f"{request.method} is not allowed on {request.url.path}; use {allowed}."
    code = HTTP_CODES.get(error.status_code, "invalid_request")
    return error_response(error.status_code, message, code=code, headers=error.headers)


def _unstorable(request: Request, error: Exception) -> JSONResponse:
    """A NUL in an id or a parameter: PostgreSQL's text can't hold one, so nothing has that name."""
    if "\0" in request.url.path:
        return error_response(404, "Nothing has an id with a NUL in it.", code="not_found")
    log.warning("The database refused a value: %s", error)
    return error_response(400, "A value in this request can't be stored.", code="invalid_value")


def _database_down(request: Request, error: Exception) -> JSONResponse:
    log.error("The database does not answer: %s", error)
    return error_response(
        503,
        "The database does not answer; try again shortly.",
        code="unavailable",
        headers={"Retry-After": "2"},
    )


def _crash(request: Request, error: Exception) -> JSONResponse:
    """Answers outside every middleware, so it sets the id by itself; the server logs the traceback."""
    request_id = request.state.request_id
    log.error("Request %s failed: %s %s", request_id, request.method, request.url.path)
    return error_response(
        500,
        f"The server failed; its log has the cause under {request_id}.",
        code="internal_error",
        headers={"x-request-id": request_id},
    )
