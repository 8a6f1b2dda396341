"""The thread that keeps an attempt's record: heartbeats, what the user wants, and the ranks' rows.

It is a thread of its own so that the supervisor's main loop watches the ranks and the lease even while the
database does not answer.
"""

import logging
import threading
from pathlib import Path

from sqlalchemy.exc import InterfaceError, OperationalError
from sqlalchemy.orm import Session, sessionmaker

from jobs import attempts
from jobs.errors import Fenced
from jobs.settings import Settings
from jobs.state import Desired
from worker.clock import boot_clock
from worker.draining import drain

log = logging.getLogger(__name__)

Sessions = sessionmaker[Session]

OUTAGE = (OperationalError, InterfaceError)
"""The database is away, or gave up on this transaction: the same again, later."""

_CYCLE_SECONDS = 1.0
_MARGIN_SECONDS = 10.0
_FAILURES_IN_A_ROW = 5


class Keeper(threading.Thread):
    def __init__(
        self, settings: Settings, sessions: Sessions, job_id: str, epoch: int, attempt_dir: Path
    ) -> None:
        super().__init__(name="keeper", daemon=True)
        self._settings = settings
        self._sessions = sessions
        self._attempt = (job_id, epoch)
        self._attempt_dir = attempt_dir
        # The caller has just taken or renewed the lease.
        self._renewed_at = boot_clock()
        self._ranks_ended = threading.Event()
        self._failures = 0
        self.desired = Desired.RUN
        self.fenced = threading.Event()
        self.broken: Exception | None = None
        """What keeps rows from being recorded, though the database answers."""

    def lease_left(self) -> float:
        """Seconds until the ranks must be gone, some time before another host may take the job."""
        margin = min(_MARGIN_SECONDS, self._settings.lease_seconds / 3)
        return self._renewed_at + self._settings.lease_seconds - margin - boot_clock()

    def run(self) -> None:
        """Until fenced, broken, or told by ``ship_the_rest`` and done."""
        while True:
            # Read before shipping: what ranks wrote before they ended is then seen by this cycle.
            last = self._ranks_ended.is_set()
            try:
                drain(self._sessions, *self._attempt, self._attempt_dir, self._heard)
            except Fenced as error:
                log.error("%s", error)
                self.fenced.set()
                return
            except OUTAGE as error:
                log.warning("The database does not answer; trying again: %s", error.orig)
            except Exception as error:
                log.exception("The run's rows could not be recorded")
                self._failures += 1
                if self._failures >= _FAILURES_IN_A_ROW:
                    self.broken = error
                    return
            else:
                self._failures = 0
                if last:
                    return
            # Cut short by the ranks' end; after it, there is nothing to wait for but the time itself.
            (self.fenced if last else self._ranks_ended).wait(_CYCLE_SECONDS)

    def ship_the_rest(self) -> None:
        """The ranks are gone: return once their last rows are in the database, or never can be."""
        self._ranks_ended.set()
        self.join()

    def _renew_if_due(self) -> None:
        now = boot_clock()
        if now - self._renewed_at >= self._settings.heartbeat_seconds:
            with self._sessions.begin() as session:
                attempts.heartbeat(session, self._settings, *self._attempt)
            # From before the request: the database's lease is at least as long as this one.
            self._renewed_at = now

    def _heard(self, desired: Desired) -> None:
        self.desired = desired
        self._renew_if_due()
