"""Settings with leases short enough to see them end, and a database with a team in it."""

import pytest
from sqlalchemy.orm import Session, sessionmaker

from jobs.settings import Settings
from tests.worker.records import HOST, add_team


@pytest.fixture
def settings(settings: Settings) -> Settings:
    quick = {
        "host": HOST,
        "slots": 4,
        "lease_seconds": 8.0,
        "heartbeat_seconds": 0.5,
        "sweep_seconds": 0.5,
        "stop_grace_seconds": 5.0,
        "retry_delay_seconds": 0.1,
    }
    return settings.model_copy(update=quick)


@pytest.fixture
def environment(settings: Settings, environment: dict[str, str]) -> dict[str, str]:
    own = {
        f"SHARDYARD_{name.upper()}": str(getattr(settings, name))
        for name in Settings.model_fields
        if name not in ("database_url", "redis_url") and getattr(settings, name) is not None
    }
    return environment | own


@pytest.fixture
def sessions(database: sessionmaker[Session]) -> sessionmaker[Session]:
    with database.begin() as session:
        add_team(session)
    return database
