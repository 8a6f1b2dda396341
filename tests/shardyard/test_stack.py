"""The embedded stack on a directory of its own: refusals before anything starts, and what survives."""

import contextlib
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from shardyard.stack.errors import StackError
from shardyard.stack.lock import running_stack
from shardyard.stack.stack import Stack

DEADLINE_SECONDS = 60.0
PARTS = {"api.main:app": "api", "-m worker": "worker", "-server": "broker", "bin/postgres": "postgres"}
"""Each part's name, by what only its command line has."""


def eventually(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"not in {DEADLINE_SECONDS:.0f} s: {what}"
        time.sleep(0.05)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(autouse=True)
def no_servers_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DATABASE_URL", raising=False)
    monkeypatch.delenv("REDIS_URL", raising=False)


class Up:
    """``shardyard up`` as a user starts it."""

    def __init__(self, data_dir: Path, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.data_dir = data_dir
        self.process = subprocess.Popen(
            [sys.executable, "-m", "shardyard", "up", "--data", str(data_dir), "--port", str(port)],
            stdout=subprocess.DEVNULL,
        )
        eventually(self.answers, "the API answers")

    def answers(self) -> bool:
        assert self.process.poll() is None
        try:
            return httpx.get(f"{self.url}/healthz", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def children(self) -> dict[str, psutil.Process]:
        """The stack's processes by what they run."""
        found = {}
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):
                line = " ".join(child.cmdline())
                found |= {name: child for part, name in PARTS.items() if part in line}
        return found

    def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout=30)


@pytest.fixture
def data_dir(short_tmp_path: Path) -> Path:
    """With what a shell, an address or a configuration file could trip over."""
    return short_tmp_path / "my data, 100% & more"


@pytest.fixture
def short_tmp_path() -> Iterator[Path]:
    """Outside pytest's directory, which other runs make unreadable for PostgreSQL's own user."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix="shardyard-stack-") as directory:
        yield Path(directory)


def test_a_second_stack_on_the_same_directory_and_a_port_in_use_are_refused(data_dir: Path) -> None:
    port = free_port()
    with Stack(data_dir, port=port) as stack:
        assert running_stack(data_dir) == stack.url
        with pytest.raises(StackError, match=rf"pid {os.getpid()} runs there at {stack.url}"):
            Stack(data_dir, port=free_port()).start()
        other = data_dir.parent / "other"
        with pytest.raises(StackError, match="Choose another with --port"):
            Stack(other, port=port).start()
        assert not (other / "postgres").exists()
    assert running_stack(data_dir) is None


def test_a_directory_that_cant_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StackError, match="Choose another --data directory"):
        Stack(tmp_path / "file" / "data").start()


def test_a_restart_keeps_the_key_and_the_data_whatever_ended_the_stack(data_dir: Path) -> None:
    port = free_port()
    up = Up(data_dir, port)
    client_file = data_dir / "client.json"
    first = json.loads(client_file.read_text())
    assert first["url"] == up.url
    assert stat.S_IMODE(client_file.stat().st_mode) == 0o600
    assert up.end(signal.SIGTERM) == 0

    up = Up(data_dir, port)
    children = up.children()
    assert set(children) == set(PARTS.values())
    up.end(signal.SIGKILL)
    postgres = children.pop("postgres")
    for name, child in children.items():
        eventually(lambda child=child: not child.is_running(), f"{name} ends with the stack")
    assert postgres.is_running(), "attempts go on"

    up = Up(data_dir, port)
    assert json.loads(client_file.read_text()) == first
    headers = {"Authorization": f"Bearer {first['api_key']}"}
    assert httpx.get(f"{up.url}/v1/models", headers=headers, timeout=10).status_code == 200
    assert not postgres.is_running()
    children = up.children()
    assert up.end(signal.SIGINT) == 0
    assert [name for name, child in children.items() if child.is_running()] == []


def test_a_part_that_dies_is_started_again(data_dir: Path) -> None:
    up = Up(data_dir, free_port())
    before = up.children()
    for child in before.values():
        child.kill()

    def all_new() -> bool:
        now = up.children()
        return now.keys() == before.keys() and all(now[name].pid != before[name].pid for name in now)

    eventually(all_new, "each part is started again")
    eventually(up.answers, "the API answers again")
    assert up.end(signal.SIGTERM) == 0


def test_a_part_that_cant_start_shows_the_end_of_its_log(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDYARD_LEASE_SECONDS", "soon")
    with pytest.raises(StackError, match=r"SHARDYARD_LEASE_SECONDS|lease_seconds"):
        Stack(data_dir, port=free_port()).start()
    assert running_stack(data_dir) is None
