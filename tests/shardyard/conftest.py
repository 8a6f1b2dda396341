"""One embedded stack for the whole folder, with a tiny model and files to train it on."""

import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from shardyard import transport
from shardyard.client import Shardyard
from shardyard.stack.stack import Stack
from tests.shardyard.scripted_server import Scripted
from tests.tiny_model import write_chat_file, write_tiny_model

MODEL = "tiny"
QUICK = {"SHARDYARD_SLOTS": "2", "SHARDYARD_SWEEP_SECONDS": "0.5", "SHARDYARD_HEARTBEAT_SECONDS": "1"}


@dataclass(frozen=True)
class CommandLine:
    """``shardyard`` as its users run it: a process, with the data directory in its environment."""

    data_dir: Path

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("SHARDYARD_")}
        return subprocess.Popen(
            [sys.executable, "-m", "shardyard", *arguments],
            env={**inherited, "SHARDYARD_DATA_DIR": str(self.data_dir), **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        with self.start(*arguments, **environment) as process:
            out, err = process.communicate(timeout=180)
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def stack() -> Iterator[Stack]:
    """Not under pytest's own directory, whose mode other runs of the same user change."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="shardyard-") as directory:
        for name in ("DATABASE_URL", "REDIS_URL"):
            patch.delenv(name, raising=False)
        for name, value in QUICK.items():
            patch.setenv(name, value)
        with Stack(Path(directory), port=free_port()) as running:
            yield running


@pytest.fixture
def client(stack: Stack, tiny_model: Path) -> Iterator[Shardyard]:
    with Shardyard(data_dir=stack.data_dir) as client:
        client.models.add(MODEL, tiny_model)
        yield client


@pytest.fixture
def command(stack: Stack, client: Shardyard) -> CommandLine:
    return CommandLine(stack.data_dir)


@pytest.fixture
def chat_file(tmp_path: Path) -> Path:
    return write_chat_file(tmp_path / "chat.jsonl", examples=32)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scripted]:
    monkeypatch.setattr(transport, "FIRST_PAUSE_SECONDS", 0.001)
    with Scripted() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
