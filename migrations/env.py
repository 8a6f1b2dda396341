"""Alembic's environment: ``jobs.bootstrap`` hands its connection over; the command line uses settings."""

from alembic import context
from sqlalchemy import create_engine

from jobs.settings import settings
from jobs.tables import Table


def run() -> None:
    connection = context.config.attributes.get("connection")
    if connection is None:
        engine = create_engine(settings().database_url)
        with engine.begin() as own:
            _migrate(own)
    else:
        _migrate(connection)
        connection.commit()


def _migrate(connection: object) -> None:
    context.configure(connection=connection, target_metadata=Table.metadata)  # type: ignore[arg-type]
    with context.begin_transaction():
        context.run_migrations()


run()
