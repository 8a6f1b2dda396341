"""Publishing the outbox: a thread of its own, for a broker that hangs must not hold up the sweep."""

import logging
import threading
from collections.abc import Callable

from kombu.exceptions import OperationalError as BrokerDown

from jobs import outbox
from jobs.settings import Settings
from worker.keeper import OUTAGE, Sessions

log = logging.getLogger(__name__)


class Relay:
    """Publishes first and deletes after: a message may go out twice, harming nobody, and is never lost."""

    def __init__(self, settings: Settings, sessions: Sessions, publish: Callable[[str], None]) -> None:
        self._settings = settings
        self._sessions = sessions
        self._publish = publish
        self._one_at_a_time = threading.Lock()

    def run_forever(self) -> None:
        pause = threading.Event()
        while True:
            self.relay()
            pause.wait(self._settings.sweep_seconds)

    def relay(self) -> int:
        """Publish what waits, until the outbox is empty or the broker is down; returns how many."""
        published = 0
        with self._one_at_a_time:
            try:
                while batch := self._relay_batch():
                    published += batch
            except BrokerDown as error:
                log.warning("The broker does not answer; hosts claim from the database meanwhile: %s", error)
            except OUTAGE as error:
                log.warning("The database does not answer; trying again: %s", error.orig)
        return published

    def _relay_batch(self) -> int:
        with self._sessions.begin() as session:
            rows = outbox.pending(session)
        published: list[int] = []
        try:
            for row_id, job_id in rows:
                self._publish(job_id)
                published.append(row_id)
        finally:
            if published:
                with self._sessions.begin() as session:
                    outbox.delete_published(session, published)
        return len(published)
