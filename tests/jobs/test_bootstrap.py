"""A database that is ready and a key that works, however often and by how many at once it is asked for."""

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import create_engine, func, select, text
from sqlalchemy.engine import make_url

from jobs.database import make_sessions
from jobs.keys import authenticate
from jobs.tables import ApiKey, Team


@pytest.fixture
def empty_database_url(postgres_url: str) -> Iterator[str]:
    name = f"empty_{uuid.uuid4().hex}"
    engine = create_engine(postgres_url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name}"))
        yield make_url(postgres_url).set(database=name).render_as_string(hide_password=False)
        connection.execute(text(f"DROP DATABASE {name} WITH (FORCE)"))
    engine.dispose()


def start(database_url: str, client_file: Path, url: str = "http://127.0.0.1:8321") -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "jobs.bootstrap", "--client-file", str(client_file), "--url", url]
    environment = {**os.environ, "DATABASE_URL": database_url, "REDIS_URL": "redis://127.0.0.1:1/0"}
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


def bootstrap(database_url: str, client_file: Path, url: str = "http://127.0.0.1:8321") -> dict[str, str]:
    finish(start(database_url, client_file, url))
    content: dict[str, str] = json.loads(client_file.read_text())
    return content


def finish(*processes: subprocess.Popen[str]) -> None:
    complaints = [process.communicate(timeout=60)[1] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), complaints


def test_two_at_once_make_one_schema_and_one_team(empty_database_url: str, tmp_path: Path) -> None:
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    finish(*[start(empty_database_url, file) for file in files])
    sessions = make_sessions(empty_database_url)
    with sessions.begin() as session:
        team = session.scalars(select(Team)).one()
        for file in files:
            caller = authenticate(session, json.loads(file.read_text())["api_key"])
            assert (caller.team_id, caller.role) == (team.id, "admin")
    sessions.kw["bind"].dispose()


def test_a_key_that_works_is_kept_and_one_that_does_not_is_replaced(
    database_url: str, tmp_path: Path
) -> None:
    file = tmp_path / "client.json"
    file.write_text("not json")
    first = bootstrap(database_url, file)
    assert file.stat().st_mode & 0o777 == 0o600
    moved = bootstrap(database_url, file, "http://127.0.0.1:9000")
    assert moved == first | {"url": "http://127.0.0.1:9000"}
    sessions = make_sessions(database_url)
    with sessions.begin() as session:
        session.scalars(select(ApiKey)).one().revoked_at = func.now()
    replaced = bootstrap(database_url, file, "http://127.0.0.1:9000")
    assert replaced["api_key"] != first["api_key"]
    with sessions.begin() as session:
        assert authenticate(session, replaced["api_key"]).role == "admin"
    sessions.kw["bind"].dispose()
