"""Where the server is and which key opens it.

An explicit value comes first, then ``SHARDYARD_URL`` and ``SHARDYARD_API_KEY``, then ``client.json``, which
the embedded stack keeps in its data directory (``SHARDYARD_DATA_DIR``, else ``.shardyard`` here).
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardyard.errors import NotConfigured

CLIENT_FILE = "client.json"


@dataclass(frozen=True)
class Address:
    url: str
    api_key: str


def data_directory() -> Path:
    """Where the embedded stack of this shell keeps everything."""
    return Path(os.environ.get("SHARDYARD_DATA_DIR") or ".shardyard")


def find_address(url: str | None = None, api_key: str | None = None, data_dir: Path | None = None) -> Address:
    url = url or os.environ.get("SHARDYARD_URL")
    api_key = api_key or os.environ.get("SHARDYARD_API_KEY")
    if url and api_key:
        return Address(url.rstrip("/"), api_key)
    path = (data_dir or data_directory()) / CLIENT_FILE
    known = _read(path)
    try:
        return Address((url or known["url"]).rstrip("/"), api_key or known["api_key"])
    except (KeyError, AttributeError) as error:
        raise NotConfigured(
            f"{path} has no url and api_key; start the server anew with `shardyard up`"
        ) from error


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise NotConfigured(
            f"no server is known here: {path} does not exist. Start one with `shardyard up`, or set "
            "SHARDYARD_DATA_DIR, or SHARDYARD_URL and SHARDYARD_API_KEY"
        ) from error
    except (OSError, ValueError) as error:
        raise NotConfigured(f"{path} can't be read: {error}") from error
    if not isinstance(content, dict):
        raise NotConfigured(f"{path} is not a JSON object; start the server anew with `shardyard up`")
    return content
