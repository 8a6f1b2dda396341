"""One stack for a data directory: a lock that the kernel lets go when its holder ends, however it ends."""

import fcntl
import json
import os
from pathlib import Path

from shardyard.stack.errors import StackError

NAME = "up.lock"


class DataLock:
    def __init__(self, data_dir: Path) -> None:
        self._path = data_dir / NAME
        self._descriptor: int | None = None

    def acquire(self, url: str) -> None:
        """Raises StackError, naming the holder, where another stack has the directory."""
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _read(descriptor)
            os.close(descriptor)
            raise StackError(
                f"{self._path.parent} is in use: a stack with pid {holder.get('pid', '?')} runs there at "
                f"{holder.get('url', '?')}. Use that one, stop it, or choose another --data directory."
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps({"pid": os.getpid(), "url": url}).encode(), 0)
        self._descriptor = descriptor

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def running_stack(data_dir: Path) -> str | None:
    """Address of the stack that runs on this directory, if one does."""
    try:
        descriptor = os.open(data_dir / NAME, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return str(_read(descriptor).get("url", ""))
    finally:
        os.close(descriptor)
    return None


def _read(descriptor: int) -> dict[str, str]:
    try:
        content = json.loads(os.pread(descriptor, 4096, 0))
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}
