"""Settings with leases short enough to see them end, and a database with a team in it."""

from pathlib import Path

import pytest
from sqlalchemy.orm import Session, sessionmaker

from jobs.settings import Settings
from tests.worker.records import HOST, add_team


@pytest.fixture
def settings(database_url: str, valkey_url: str, tmp_path: Path) -> Settings:
    return Settings(
        database_url=database_url,
        redis_url=valkey_url,
        data_dir=tmp_path / "data",
        host=HOST,
        slots=4,
        lease_seconds=8,
        heartbeat_seconds=0.5,
        sweep_seconds=0.5,
        stop_grace_seconds=5,
        retry_delay_seconds=0.1,
    )


@pytest.fixture
def sessions(database: sessionmaker[Session]) -> sessionmaker[Session]:
    with database.begin() as session:
        add_team(session)
    return database
