"""Where the server is and which key opens it.

An explicit value comes first, then ``SHARDYARD_URL`` and ``SHARDYARD_API_KEY``, then ``client.json``, which
the embedded stack keeps in its data directory (``SHARDYARD_DATA_DIR``, else ``.shardyard`` here).
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path

from shardyard.errors import NotConfigured

CLIENT_FILE = "client.json"


@dataclass(frozen=True)
class Address:
    url: str
    api_key: str


def data_dir() -> Path:
    """Where the embedded stack of this shell keeps everything."""
    return Path(os.environ.get("SHARDYARD_DATA_DIR") or ".shardyard")


def find(url: str | None = None, api_key: str | None = None, directory: Path | None = None) -> Address:
    url = url or os.environ.get("SHARDYARD_URL")
    api_key = api_key or os.environ.get("SHARDYARD_API_KEY")
    if url and api_key:
        return Address(url.rstrip("/"), api_key)
    known = read_client_file(directory or data_dir())
    return Address((url or known.url).rstrip("/"), api_key or known.api_key)


def read_client_file(directory: Path) -> Address:
    """What the embedded stack on this data directory wrote for its clients."""
    path = directory / CLIENT_FILE
    try:
        content = json.loads(path.read_text())
        return Address(str(content["url"]), str(content["api_key"]))
    except FileNotFoundError as error:
        raise NotConfigured(
            f"no server is known here: {path} does not exist. Start one with `shardyard up`, or set "
            "SHARDYARD_DATA_DIR, or SHARDYARD_URL and SHARDYARD_API_KEY"
        ) from error
    except OSError as error:
        raise NotConfigured(f"{path} can't be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise NotConfigured(
            f"{path} has no url and api_key; start the server anew with `shardyard up`"
        ) from error
