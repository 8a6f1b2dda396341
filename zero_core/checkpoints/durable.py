"""Files that are whole or absent, also after a power cut."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any


def sync(path: Path) -> None:
    """Flush a file, or a directory's list of names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(directory: Path) -> None:
    for path in directory.rglob("*"):
        sync(path)
    sync(directory)


def write_json(path: Path, value: Any) -> str:
    """Write ``value`` aside, rename it into place, and return the sha256 of what was written."""
    content = json.dumps(value, indent=1, allow_nan=False).encode()
    aside = path.with_name(f".{path.name}.tmp")
    with aside.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
    sync(path.parent)
    return hashlib.sha256(content).hexdigest()


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
