"""``python -m jobs.bootstrap``: a database that is ready, and a key to use it with.

Runs the migrations, makes the default team and an administrator's key, and writes both to a file for the
client. Safe to run again, and by two at once.
"""

import argparse
import json
import os
from importlib.resources import files
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from sqlalchemy import create_engine, select, text
from sqlalchemy.orm import Session

from jobs.database import sessions
from jobs.errors import Unauthenticated
from jobs.ids import new_id
from jobs.keys import authenticate, create_key
from jobs.settings import settings
from jobs.tables import Team

DEFAULT_TEAM = "default"
LOCK = 0x5A1D
"""Advisory lock that migrations hold."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--client-file", type=Path, help="where url and api_key are kept for the client")
    parser.add_argument("--url", help="where the API will be reached", default="http://127.0.0.1:8321")
    arguments = parser.parse_args()
    migrate(settings().database_url)
    with sessions().begin() as session:
        team = ensure_team(session, DEFAULT_TEAM)
        if arguments.client_file is not None:
            write_client_file(session, team.id, arguments.client_file, arguments.url)


def migrate(database_url: str, revision: str = "head") -> None:
    """Bring the schema to ``revision``, up or down, one process at a time."""
    engine = create_engine(database_url)
    config = Config()
    config.set_main_option("script_location", str(files("migrations")))
    with engine.connect() as connection:
        connection.execute(text("SELECT pg_advisory_lock(:lock)"), {"lock": LOCK})
        connection.commit()
        config.attributes["connection"] = connection
        if revision == "base":
            command.downgrade(config, revision)
        else:
            command.upgrade(config, revision)
        connection.execute(text("SELECT pg_advisory_unlock(:lock)"), {"lock": LOCK})
        connection.commit()
    engine.dispose()


def ensure_team(session: Session, name: str) -> Team:
    session.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": LOCK})
    team = session.scalar(select(Team).where(Team.name == name))
    if team is None:
        team = Team(id=new_id("team-"), name=name)
        session.add(team)
        session.flush()
    return team


def write_client_file(session: Session, team_id: str, path: Path, url: str) -> None:
    """Keep a key that still works; write a new one, readable by its owner alone, where there is none."""
    known = _read(path)
    key = known.get("api_key", "")
    try:
        authenticate(session, key)
    except Unauthenticated:
        key = create_key(session, team_id, "embedded stack", "admin")
    content = {"url": url, "api_key": key}
    if content == known:
        return
    aside = path.with_name(f".{path.name}.tmp")
    aside.unlink(missing_ok=True)
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump(content, file)
    aside.rename(path)


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


if __name__ == "__main__":
    main()
