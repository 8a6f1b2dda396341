"""What can go wrong for a user of the client and the command line.

ShardyardError
├── Unreachable            the server does not answer
│   └── NotConfigured      nothing says where the server is, or with which key
├── UnreadableFile         a local file that can't be read or written
├── UnusableFile           an uploaded file that the server can't train on
├── Unconvertible          a local file of which no training file can be made
├── PreviewFailed          what a model is given of a file can't be shown
├── StackError             the embedded stack can't start or go on (``shardyard.stack.errors``)
├── JobFailed              a job that was waited for did not succeed
├── NoResults              a job has no results file, for it has not succeeded
├── DemoFailed             a part of the demo, or what it must show, did not work
└── ErrorAnswer            the server answered with an error
    ├── Refused            4xx: it understood, and said no
    │   ├── BadRequest           400
    │   ├── Unauthenticated      401
    │   ├── Forbidden            403
    │   ├── NotFound             404
    │   ├── Conflict             409
    │   ├── TooLarge             413
    │   ├── Unprocessable        422
    │   └── RateLimited          429
    └── ServerFailed       5xx: it could not
"""

from typing import Any

import httpx


class ShardyardError(Exception):
    """Base of all. The message says the value and what to do."""

    code = "error"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class Unreachable(ShardyardError):
    code = "unreachable"


class NotConfigured(Unreachable):
    code = "not_configured"


class UnreadableFile(ShardyardError):
    code = "unreadable_file"


class UnusableFile(ShardyardError):
    code = "unusable_file"


class Unconvertible(ShardyardError):
    code = "unconvertible_file"


class PreviewFailed(ShardyardError):
    code = "preview_failed"


class JobFailed(ShardyardError):
    code = "job_failed"


class NoResults(ShardyardError):
    code = "no_results"


class DemoFailed(ShardyardError):
    code = "demo_failed"


class ErrorAnswer(ShardyardError):
    """The server's own words: OpenAI's error shape, the status, and the id under which its log has it."""

    def __init__(
        self,
        message: str,
        *,
        status: int,
        code: str | None = None,
        param: str | None = None,
        request_id: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code or f"http_{status}"
        self.param = param
        self.request_id = request_id

    def __str__(self) -> str:
        if self.request_id is None:
            return self.message
        return f"{self.message} (request {self.request_id})"


class Refused(ErrorAnswer):
    """The server understood the request and will not do it."""


class BadRequest(Refused):
    pass


class Unauthenticated(Refused):
    pass


class Forbidden(Refused):
    pass


class NotFound(Refused):
    pass


class Conflict(Refused):
    pass


class TooLarge(Refused):
    pass


class Unprocessable(Refused):
    pass


class RateLimited(Refused):
    pass


class ServerFailed(ErrorAnswer):
    """The server could not do it, now or at all."""


_BY_STATUS: dict[int, type[ErrorAnswer]] = {
    400: BadRequest,
    401: Unauthenticated,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    413: TooLarge,
    422: Unprocessable,
    429: RateLimited,
}


def error_answer(response: httpx.Response) -> ErrorAnswer:
    """The error that an answer holds. A proxy's own page, which is not in the shape, is quoted."""
    status = response.status_code
    kind = _BY_STATUS.get(status, ServerFailed if status >= 500 else Refused)
    error = _error_of(response)
    message = error.get("message") or f"HTTP {status} from {response.url}: {response.text[:200]!r}"
    return kind(
        str(message),
        status=status,
        code=error.get("code"),
        param=error.get("param"),
        request_id=response.headers.get("x-request-id"),
    )


def _error_of(response: httpx.Response) -> dict[str, Any]:
    try:
        error = response.json()["error"]
    except (ValueError, KeyError, TypeError):
        return {}
    return error if isinstance(error, dict) else {}
