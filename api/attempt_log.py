"""The end of an attempt's log, read from the back: logs grow for days."""

import os
from pathlib import Path

BLOCK = 64 * 1024
LARGEST = 16 * 2**20
"""Bytes read at most, however long the lines are."""


def tail_of_log(path: Path, lines: int) -> str:
    """The last ``lines`` lines; nothing where there is no log yet."""
    try:
        with path.open("rb") as file:
            position = file.seek(0, os.SEEK_END)
            content = b""
            while position > 0 and content.count(b"\n") <= lines and len(content) < LARGEST:
                step = min(BLOCK, position)
                position = file.seek(position - step)
                content = file.read(step) + content
    except FileNotFoundError:
        return ""
    kept = content.splitlines(keepends=True)[-lines:]
    return b"".join(kept).decode(errors="replace")
