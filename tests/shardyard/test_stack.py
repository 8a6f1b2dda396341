"""The embedded stack on a directory of its own: refusals before anything starts, and what survives."""

import json
import os
import signal
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

import httpx
import psycopg
import pytest

from shardyard.stack.account import popen_options, server_account
from shardyard.stack.child import LONGEST_PAUSE, Backoff
from shardyard.stack.errors import StackError
from shardyard.stack.lock import running_stack
from shardyard.stack.postgres import Postgres
from shardyard.stack.stack import Stack
from tests.e2e.conftest import eventually, free_port
from tests.shardyard.up_process import Up


@pytest.fixture(autouse=True)
def no_servers_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DATABASE_URL", raising=False)
    monkeypatch.delenv("REDIS_URL", raising=False)


@pytest.fixture
def up(data_dir: Path) -> Iterator[Callable[[], Up]]:
    """Starts ``shardyard up``, each time on the same directory and port; one that is left is stopped."""
    started: list[Up] = []
    port = free_port()

    def start() -> Up:
        started.append(Up(data_dir, port))
        started[-1].wait_until_all_run()
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.end(signal.SIGTERM)


@pytest.fixture
def data_dir(short_tmp_path: Path) -> Path:
    """With what a shell, an address or a configuration file could trip over."""
    return short_tmp_path / "my data, 100% & more"


@pytest.fixture
def short_tmp_path() -> Iterator[Path]:
    """Outside pytest's directory, which other runs make unreadable for PostgreSQL's own user."""
    with tempfile.TemporaryDirectory(prefix="shardyard-stack-") as directory:
        yield Path(directory)


def test_a_second_stack_on_the_same_directory_and_a_port_in_use_are_refused(data_dir: Path) -> None:
    port = free_port()
    with Stack(data_dir, port=port) as stack:
        assert running_stack(data_dir) == stack.url
        assert not stat.S_IMODE(data_dir.stat().st_mode) & (stat.S_IROTH | stat.S_IRGRP)
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


def test_a_restart_keeps_the_key_and_the_data_whatever_ended_the_stack(
    up: Callable[[], Up], data_dir: Path
) -> None:
    stack = up()
    client_file = data_dir / "client.json"
    first = json.loads(client_file.read_text())
    assert first["url"] == stack.url
    assert stat.S_IMODE(client_file.stat().st_mode) == 0o600
    assert stack.end(signal.SIGTERM) == 0

    stack = up()
    children = stack.children()
    stack.end(signal.SIGKILL)
    postgres = children.pop("postgres")
    for name, child in children.items():
        eventually(lambda child=child: not child.is_running(), f"{name} ends with the stack")
    assert postgres.is_running(), "attempts go on"

    stack = up()
    assert json.loads(client_file.read_text()) == first
    headers = {"Authorization": f"Bearer {first['api_key']}"}
    assert httpx.get(f"{stack.url}/v1/models", headers=headers, timeout=10).status_code == 200
    assert not postgres.is_running()
    children = stack.children()
    assert stack.end(signal.SIGINT) == 0
    assert [name for name, child in children.items() if child.is_running()] == []


def test_a_part_that_dies_is_started_again(up: Callable[[], Up]) -> None:
    stack = up()
    before = stack.children()
    for child in before.values():
        child.kill()

    def all_new() -> bool:
        now = stack.children()
        return now.keys() == before.keys() and all(now[name].pid != before[name].pid for name in now)

    eventually(all_new, "each part is started again")
    eventually(stack.answers, "the API answers again")
    assert stack.end(signal.SIGTERM) == 0


def test_a_part_that_cant_start_shows_the_end_of_its_log(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDYARD_LEASE_SECONDS", "soon")
    with pytest.raises(StackError, match=r"SHARDYARD_LEASE_SECONDS|lease_seconds"):
        Stack(data_dir, port=free_port()).start()
    assert running_stack(data_dir) is None


class Server:
    """PostgreSQL alone, as the stack runs it."""

    def __init__(self, data_dir: Path) -> None:
        data_dir.mkdir(parents=True, exist_ok=True)
        self.directory = data_dir / "postgres"
        self._server = Postgres(self.directory, dict(os.environ), data_dir)

    def __enter__(self) -> Self:
        self._server.prepare()
        self._server.child.start()
        eventually(self._server.answers, "PostgreSQL answers")
        return self

    def __exit__(self, *_: object) -> None:
        self._server.child.stop()
        self._server.clean_up()

    def ask(self, statement: str) -> object:
        address = self._server.url.replace("postgresql+psycopg:", "postgresql:")
        with psycopg.connect(address) as connection:
            row = connection.execute(statement).fetchone()
        return None if row is None else row[0]


def test_a_pid_file_that_names_another_process_and_an_initdb_cut_short_are_no_hindrance(
    data_dir: Path,
) -> None:
    half = data_dir / "postgres.new"
    half.mkdir(parents=True)
    (half / "PG_VERSION").write_text("18")
    with Server(data_dir) as server:
        assert server.ask("SELECT 1") == 1
    assert not half.exists()
    options = popen_options(server_account())
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, cwd="/", **options) as other:
        pid_file = server.directory / "postmaster.pid"
        pid_file.write_text(f"{other.pid}\n{server.directory}\n")
        with Server(data_dir) as server:
            assert server.ask("SELECT 1") == 1
        assert other.poll() is None


def test_a_path_too_long_for_a_socket_gets_one_elsewhere_that_is_private(short_tmp_path: Path) -> None:
    data_dir = short_tmp_path / ("long" * 30)
    with Server(data_dir) as server:
        sockets = Path(str(server.ask("SHOW unix_socket_directories")))
        assert not sockets.is_relative_to(data_dir)
        assert stat.S_IMODE(sockets.stat().st_mode) == 0o700
    assert not sockets.exists()


def test_another_account_does_not_get_into_the_database(data_dir: Path) -> None:
    """Who connects is told by the kernel: the account's own name must be the stack's."""
    with Server(data_dir) as server:
        assert server.ask("SELECT auth_method FROM pg_hba_file_rules") == "peer"
        (server.directory / "pg_ident.conf").write_text("stack somebody-else postgres\n")
        server.ask("SELECT pg_reload_conf()")

        def refused() -> bool:
            try:
                server.ask("SELECT 1")
            except psycopg.OperationalError as error:
                return "Peer authentication failed" in str(error)
            return False

        eventually(refused, "a name that is not in the map is refused")
    with Server(data_dir) as server:
        assert server.ask("SELECT 1") == 1


def test_a_directory_of_the_users_does_not_take_the_place_of_a_package(
    data_dir: Path, short_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("api", "jobs", "worker", "zero_core", "uvicorn"):
        (short_tmp_path / name).mkdir()
        (short_tmp_path / name / "__init__.py").write_text("raise SystemExit('the wrong package')")
    monkeypatch.chdir(short_tmp_path)
    with Stack(data_dir, port=free_port()) as stack:
        assert httpx.get(f"{stack.url}/readyz", timeout=10).json()["status"] == "ok"


def test_pauses_grow_and_start_anew_after_a_long_life() -> None:
    backoff = Backoff()
    assert [backoff.after(lived=1) for _ in range(8)] == [0.5, 1, 2, 4, 8, 16, 30, 30]
    assert backoff.after(lived=LONGEST_PAUSE + 1) == 0.5
    assert backoff.after(lived=1) == 1
