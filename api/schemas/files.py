"""A file as clients see it."""

from typing import Literal

from api.schemas.lists import Seconds, Shape


class FileObject(Shape):
    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: Seconds
    filename: str
    purpose: str
    status: Literal["uploaded", "processed", "error"]
    status_details: str | None
    """Why the file can't be trained on."""
    expires_at: Seconds | None
    sha256: str
    format: Literal["chat", "preference", "completion", "text"] | None
    examples: int | None
    """Good lines."""
    warnings: list[str]
    """What of the file is not used."""
