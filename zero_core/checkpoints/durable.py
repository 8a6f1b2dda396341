"""Files that are whole or absent, also after a power cut."""

import hashlib
import io
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


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
    write_bytes(path, content)
    return hashlib.sha256(content).hexdigest()


def write_array(path: Path, array: NDArray[Any]) -> None:
    """Write ``array`` in NumPy's own format aside, and rename it into place."""
    content = io.BytesIO()
    np.save(content, array, allow_pickle=False)
    write_bytes(path, content.getvalue())


def write_bytes(path: Path, content: bytes) -> None:
    """Write ``content`` aside, and rename it into place."""
    aside = path.with_name(f".{path.name}.tmp")
    with aside.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
    sync(path.parent)


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
