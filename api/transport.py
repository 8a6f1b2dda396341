"""What every request passes before a route sees it: an id, and limits on its size."""

import json
import uuid
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

JSON_LIMIT = 2**20
"""Bytes of a body that is not an upload."""

HEADER_LIMIT = 2**16
"""Bytes of all headers together."""

UPLOAD_SLACK = 2**20
"""Bytes that a multipart body may have beside its file."""


NOSNIFF = (b"x-content-type-options", b"nosniff")
"""Files and logs hold what others wrote: no browser may take them for a page."""


class RequestId:
    """Gives each request an id, which the answer carries as ``x-request-id`` and the log names."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = f"req_{uuid.uuid4().hex}"
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    *message["headers"],
                    (b"x-request-id", request_id.encode()),
                    NOSNIFF,
                ]
            await send(message)

        await self._app(scope, receive, send_with_id)


class SizeLimit:
    """Ends a request that is too large while it comes in, before any of it is stored."""

    def __init__(self, app: ASGIApp, upload_limit: Callable[[], int]) -> None:
        self._app = app
        self._upload_limit = upload_limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        is_upload = (scope["method"], scope["path"]) == ("POST", "/v1/files")
        limit = self._upload_limit() + UPLOAD_SLACK if is_upload else JSON_LIMIT
        if sum(len(name) + len(value) for name, value in scope["headers"]) > HEADER_LIMIT:
            await _refuse(send, 431, f"The headers are larger than {HEADER_LIMIT:,} bytes together.")
            return
        received = 0
        answered = False

        async def receive_limited() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > limit:
                raise _TooLarge
            return message

        async def send_noting(message: Message) -> None:
            nonlocal answered
            answered = True
            await send(message)

        try:
            if _declared_length(scope) > limit:
                raise _TooLarge
            await self._app(scope, receive_limited, send_noting)
        except _TooLarge:
            if not answered:
                message = f"The body is larger than {limit:,} bytes, the most that is taken here."
                await _refuse(send, 413, message)


class _TooLarge(BaseException):
    """Not an Exception: the handlers of the application inside must not answer it."""


def _declared_length(scope: Scope) -> int:
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit():
            return int(value)
    return 0


async def _refuse(send: Send, status: int, message: str) -> None:
    """Outside of every other part, so it answers by itself; the rest of the request is not read."""
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": "too_large"}
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps({"error": error}).encode()})
