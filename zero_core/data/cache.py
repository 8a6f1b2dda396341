"""Prepared files on disk, by what they were made of: another run, and every rank, reads what one has made.

An entry is a directory with an ``.npy`` file an array and ``entry.json``, which has their sums. It is
written aside, flushed and renamed, so it is whole or absent; one that was damaged later is made anew.
Entries that were not used for longest go when all together are more than the limit.
"""

import json
import os
import shutil
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zero_core.checkpoints import durable

LIMIT_BYTES = 10 * 2**30

_META = "entry.json"
_ASIDE = ".aside-"
_ABANDONED_SECONDS = 3600.0


class Cache:
    def __init__(self, directory: Path, limit_bytes: int = LIMIT_BYTES) -> None:
        self._directory = directory
        self._limit_bytes = limit_bytes

    def meta(self, key: str) -> dict[str, Any] | None:
        """What ``store`` was given beside the arrays; None where there is no entry, or a damaged one."""
        entry = self._directory / key
        try:
            content = json.loads((entry / _META).read_bytes())
            whole = all(durable.sha256_of(entry / name) == sum_ for name, sum_ in content["sha256"].items())
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            return None
        if not whole:
            return None
        os.utime(entry)
        meta: dict[str, Any] = content["meta"]
        return meta

    def store(self, key: str, arrays: Mapping[str, NDArray[Any]], meta: dict[str, Any]) -> None:
        """Replaces a damaged entry. Raises OSError where there is no room."""
        aside = self._aside()
        aside.mkdir(parents=True)
        try:
            for name, array in arrays.items():
                np.save(aside / f"{name}.npy", array, allow_pickle=False)
            sums = {f"{name}.npy": durable.sha256_of(aside / f"{name}.npy") for name in arrays}
            durable.write_json(aside / _META, {"sha256": sums, "meta": meta})
            durable.sync_tree(aside)
            self._put_in_place(aside, key)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
        durable.sync(self._directory)
        self._evict(key)

    def read(self, key: str) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        """The arrays, mapped read-only so that all ranks of a host share them, and the rest."""
        entry = self._directory / key
        content = json.loads((entry / _META).read_bytes())
        arrays = {
            Path(name).stem: np.asarray(np.load(entry / name, mmap_mode="r", allow_pickle=False))
            for name in content["sha256"]
        }
        return arrays, content["meta"]

    def _aside(self) -> Path:
        return self._directory / f"{_ASIDE}{uuid.uuid4().hex}"

    def _put_in_place(self, aside: Path, key: str) -> None:
        self._remove(self._directory / key)
        try:
            aside.rename(self._directory / key)
        except OSError:
            # Another run was as fast, with the same content.
            if not (self._directory / key / _META).is_file():
                raise

    def _remove(self, entry: Path) -> None:
        """Out of the way in one step: nobody takes half of it for the entry. Who has mapped it keeps it."""
        aside = self._aside()
        try:
            entry.rename(aside)
        except FileNotFoundError:
            return
        shutil.rmtree(aside, ignore_errors=True)

    def _evict(self, newest: str) -> None:
        entries = sorted(self._directory.iterdir(), key=_used_at, reverse=True)
        kept = 0
        for entry in entries:
            kept += _size(entry)
            if entry.name.startswith(_ASIDE):
                superfluous = time.time() - _used_at(entry) > _ABANDONED_SECONDS
            else:
                superfluous = kept > self._limit_bytes and entry.name != newest
            if superfluous:
                self._remove(entry)


def _used_at(entry: Path) -> float:
    try:
        return entry.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _size(entry: Path) -> int:
    try:
        return sum(file.stat().st_size for file in entry.iterdir())
    except FileNotFoundError:
        return 0
