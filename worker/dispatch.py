"""From a queued job to a running supervisor: claim, start a detached process, be done."""

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable

from jobs import attempts
from jobs.claims import ClaimedJob, claim
from jobs.errors import Fenced
from jobs.settings import Settings
from worker.host import HostIdentity
from worker.keeper import Sessions
from worker.sweep import ATTEMPT_VARIABLE, attempt_tag
from worker.verdict import stopped_by

log = logging.getLogger(__name__)


class Dispatcher:
    """``ended`` is called each time that a supervisor started here has ended, from another thread."""

    def __init__(
        self,
        settings: Settings,
        sessions: Sessions,
        host: HostIdentity,
        *,
        ended: Callable[[], None],
        supervisor_module: str = "worker.supervisor",
    ) -> None:
        self._settings = settings
        self._sessions = sessions
        self._host = host
        self._ended = ended
        self._supervisor_module = supervisor_module

    def claim(self, job_id: str | None = None) -> bool:
        """Claim one job and start its supervisor; False when there is none that fits here now."""
        with self._sessions.begin() as session:
            claimed = claim(session, self._settings, self._host.name, self._host.boot_id, job_id)
        if claimed is None:
            return False
        log.info("Claimed %s as attempt %d on devices %s", claimed.job_id, claimed.epoch, claimed.gpus)
        try:
            process = self._start_supervisor(claimed)
        except OSError as error:
            self._give_back(claimed, error)
        else:
            threading.Thread(target=self._await_end, args=(process,), daemon=True).start()
        return True

    def _start_supervisor(self, claimed: ClaimedJob) -> subprocess.Popen[bytes]:
        directory = self._settings.attempt_dir(claimed.job_id, claimed.epoch)
        directory.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", self._supervisor_module]
        with (directory / "log.txt").open("ab") as output:
            return subprocess.Popen(
                [*command, "--job", claimed.job_id, "--epoch", str(claimed.epoch)],
                env=os.environ | {ATTEMPT_VARIABLE: attempt_tag(claimed.job_id, claimed.epoch)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                # Signals to the worker's terminal or process group must not reach a training run.
                start_new_session=True,
            )

    def _await_end(self, process: subprocess.Popen[bytes]) -> None:
        # Waiting collects the exit status, or an ended supervisor would stay as a zombie.
        process.wait()
        self._ended()

    def _give_back(self, claimed: ClaimedJob, error: OSError) -> None:
        log.error("Could not start a supervisor for %s: %s", claimed.job_id, error)
        ending = stopped_by(error, "start the job")
        try:
            with self._sessions.begin() as session:
                job = attempts.hold(session, claimed.job_id, claimed.epoch)
                attempts.finish(session, self._settings, job, ending)
        except Fenced:
            log.info("%s has been taken over meanwhile", claimed.job_id)
