"""The service's errors: one class and one stable code each.

    ShardyardError
    ├── NotFound              404  an id that does not exist for this caller
    ├── InvalidRequest        400  a value that can't be used; ``param`` names it
    ├── Unprocessable         422  understood, and refused
    ├── Conflict              409  the state does not allow it
    ├── Unauthenticated       401  no key, or one that is not valid
    ├── Forbidden             403  a valid key without this right
    ├── TooLarge              413  over a limit of size
    ├── StorageFull           507  the disk has no room for it
    └── Fenced                 —   a newer attempt owns the job; the caller must stop

Only ``api/errors.py`` knows the HTTP statuses; they stand here for the reader.
"""


class ShardyardError(Exception):
    """Base of every error that a user may see. The message says the value and what to do."""

    code = "error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code


class NotFound(ShardyardError):
    code = "not_found"


class InvalidRequest(ShardyardError):
    code = "invalid_value"


class Unprocessable(ShardyardError):
    code = "unprocessable"


class Conflict(ShardyardError):
    code = "conflict"


class Unauthenticated(ShardyardError):
    code = "invalid_api_key"


class Forbidden(ShardyardError):
    code = "forbidden"


class TooLarge(ShardyardError):
    code = "too_large"


class StorageFull(ShardyardError):
    code = "disk_full"


class Fenced(ShardyardError):
    code = "fenced"
