"""Ending attempts whose supervisor is gone.

An attempt is lost when both are true: its lease has expired by the database's clock, and its heartbeat has
not moved for a full lease by this process's own. Either alone may lie: a database that was away, or a clock
that jumped. On the attempt's own host there is a proof that needs no waiting: the supervisor's process is
gone.
"""

import logging
from dataclasses import dataclass

from sqlalchemy import func, select

from jobs import attempts, hosts
from jobs.attempts import Ending
from jobs.errors import Fenced
from jobs.settings import Settings
from jobs.state import LIVE, Reason, State
from jobs.tables import Attempt, Job
from worker import sweep
from worker.clock import boot_clock
from worker.draining import drain
from worker.host import HostIdentity
from worker.keeper import OUTAGE, Sessions

log = logging.getLogger(__name__)

_KILL_SECONDS = 10.0


@dataclass(frozen=True)
class LiveAttempt:
    job_id: str
    epoch: int
    heartbeat_seq: int
    lease_expired: bool
    host: str
    boot_id: str
    supervisor: sweep.ProcessIdentity | None


class Reaper:
    def __init__(self, settings: Settings, sessions: Sessions, host: HostIdentity) -> None:
        self._settings = settings
        self._sessions = sessions
        self._host = host
        self._last_moved: dict[tuple[str, int], tuple[int, float]] = {}

    def reap(self) -> int:
        """End every attempt that is lost; returns how many."""
        live = self._live_attempts()
        known = {(attempt.job_id, attempt.epoch) for attempt in live}
        self._last_moved = {key: moved for key, moved in self._last_moved.items() if key in known}
        return sum(self._end(attempt) for attempt in live if self._lost(attempt))

    def release_abandoned(self) -> None:
        """Give back devices here whose attempt was ended from elsewhere, once its processes are gone."""
        with self._sessions.begin() as session:
            abandoned = hosts.abandoned(session, self._host.name)
        for job_id, epoch in abandoned:
            if sweep.kill_all(sweep.attempt_tag(job_id, epoch), _KILL_SECONDS):
                with self._sessions.begin() as session:
                    hosts.release(session, self._host.name, job_id, epoch)

    def _live_attempts(self) -> list[LiveAttempt]:
        query = (
            select(Job.heartbeat_seq, (Job.lease_until < func.now()).label("expired"), Attempt)
            .join(Attempt, (Attempt.job_id == Job.id) & (Attempt.epoch == Job.epoch))
            .where(Job.state.in_(sorted(LIVE)))
        )
        with self._sessions.begin() as session:
            return [
                LiveAttempt(
                    attempt.job_id,
                    attempt.epoch,
                    seq,
                    expired,
                    attempt.host,
                    attempt.boot_id,
                    _process(attempt),
                )
                for seq, expired, attempt in session.execute(query)
            ]

    def _lost(self, attempt: LiveAttempt) -> bool:
        key = (attempt.job_id, attempt.epoch)
        seq, since = self._last_moved.get(key, (None, 0.0))
        if seq != attempt.heartbeat_seq:
            since = boot_clock()
            self._last_moved[key] = (attempt.heartbeat_seq, since)
        if self._is_ours(attempt) and attempt.supervisor is not None and attempt.supervisor.gone():
            return True
        silent = boot_clock() - since >= self._settings.lease_seconds
        return attempt.lease_expired and silent

    def _is_ours(self, attempt: LiveAttempt) -> bool:
        return (attempt.host, attempt.boot_id) == (self._host.name, self._host.boot_id)

    def _end(self, attempt: LiveAttempt) -> bool:
        ours = self._is_ours(attempt)
        tag = sweep.attempt_tag(attempt.job_id, attempt.epoch)
        if ours and not sweep.kill_all(tag, _KILL_SECONDS):
            log.error("Processes of %s can't be killed; its devices stay taken until they end", tag)
            return False
        ending = Ending(State.RETRY_WAIT, Reason.LOST, "Its supervisor ended without a word.")
        try:
            if ours:
                self._drain(attempt)
            with self._sessions.begin() as session:
                job = attempts.hold(session, attempt.job_id, attempt.epoch)
                if job.heartbeat_seq != attempt.heartbeat_seq:
                    return False
                # What runs on another host can't be swept from here; that host gives its devices back.
                state = attempts.finish(session, self._settings, job, ending, free_gpus=ours)
        except Fenced:
            return False
        log.warning("Attempt %d of %s was lost: the job is %s", attempt.epoch, attempt.job_id, state)
        return True

    def _drain(self, attempt: LiveAttempt) -> None:
        """What its ranks wrote last, checkpoints above all: the next attempt starts from the newest."""
        directory = self._settings.attempt_dir(attempt.job_id, attempt.epoch)
        try:
            drain(self._sessions, attempt.job_id, attempt.epoch, directory, heard=lambda desired: None)
        except (Fenced, *OUTAGE):
            raise
        except Exception:
            # Rows that can't be recorded must not keep the job from going on.
            log.exception("The last rows of attempt %d of %s are lost", attempt.epoch, attempt.job_id)


def _process(attempt: Attempt) -> sweep.ProcessIdentity | None:
    if attempt.pid is None or attempt.pid_start is None:
        return None
    return sweep.ProcessIdentity(attempt.pid, attempt.pid_start)
