"""The way to the database: ``with sessions().begin() as session:`` is one transaction."""

from functools import cache

from sqlalchemy import create_engine
from sqlalchemy.orm import Session, sessionmaker

from jobs.settings import settings


def make_sessions(url: str) -> sessionmaker[Session]:
    """A connection that a restarted server dropped is noticed before it is used."""
    engine = create_engine(
        url,
        pool_pre_ping=True,
        pool_size=10,
        max_overflow=20,
        connect_args={"connect_timeout": 5, "application_name": "shardyard"},
    )
    return sessionmaker(engine, expire_on_commit=False)


@cache
def sessions() -> sessionmaker[Session]:
    return make_sessions(settings().database_url)
