"""What a worker does without being told: every pass leaves the database as if no message were ever needed."""

import logging
import threading
from collections.abc import Callable

from jobs import claims, hosts
from jobs.settings import Settings
from worker.dispatch import Dispatcher
from worker.host import HostIdentity
from worker.keeper import OUTAGE, Sessions
from worker.reaper import Reaper

log = logging.getLogger(__name__)


class Sweeper:
    """Any number of them may run, in any number of processes: every step is idempotent."""

    def __init__(
        self,
        settings: Settings,
        sessions: Sessions,
        host: HostIdentity,
        *,
        supervisor_module: str = "worker.supervisor",
    ) -> None:
        self._settings = settings
        self._sessions = sessions
        self._host = host
        self._reaper = Reaper(settings, sessions, host)
        self._due = threading.Event()
        self._one_at_a_time = threading.Lock()
        self.dispatcher = Dispatcher(
            settings, sessions, host, ended=self._due.set, supervisor_module=supervisor_module
        )

    def run_forever(self) -> None:
        """A pass every ``sweep_seconds``, and at once when a supervisor of this worker has ended."""
        while True:
            self.sweep()
            self._due.wait(self._settings.sweep_seconds)
            self._due.clear()

    def sweep(self) -> None:
        """One pass. A step that fails is logged and tried again by the next pass."""
        with self._one_at_a_time:
            for step in (self._register, self._reaper.reap, self._reaper.release_abandoned, self._promote):
                _attempt(step)
            _attempt(self._claim_all)

    def _register(self) -> None:
        host = self._host
        with self._sessions.begin() as session:
            hosts.register(session, host.name, host.boot_id, host.device, host.slots)

    def _promote(self) -> None:
        with self._sessions.begin() as session:
            claims.promote(session)

    def _claim_all(self) -> None:
        while self.dispatcher.claim():
            pass


def _attempt(step: Callable[[], object]) -> None:
    try:
        step()
    except OUTAGE as error:
        log.warning("The database does not answer; trying again: %s", error.orig)
    except Exception:
        log.exception("A step of the sweep failed; trying again")
