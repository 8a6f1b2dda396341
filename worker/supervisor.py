"""One attempt of one job, from claim to end: ``python -m worker.supervisor --job ID --epoch N``.

A session of its own, so that nothing that happens to the Celery worker reaches it. The main thread watches
the ranks and the lease; ``Keeper`` talks to the database. The order at the end is the guarantee: ranks
proved gone, rows shipped, then one fenced transaction that ends the attempt and gives the GPUs back.
"""

import argparse
import logging
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Literal, TypeVar

from sqlalchemy.orm import Session

from jobs import attempts, results, runs
from jobs.attempts import Ending
from jobs.database import sessions
from jobs.errors import Fenced, StorageFull
from jobs.models import publish_fine_tuned
from jobs.settings import Settings, settings
from jobs.state import Desired, State
from worker import sweep
from worker.hang import HangWatch
from worker.keeper import OUTAGE, Keeper, Sessions
from worker.launchers import Launch, Launcher
from worker.launchers.torchrun import Torchrun
from worker.memory_events import oom_kills
from worker.run_directory import RunDirectory
from worker.verdict import Evidence, decide, stopped_by

# By name: as a program this module is ``__main__``.
log = logging.getLogger("worker.supervisor")

T = TypeVar("T")

_POLL_SECONDS = 0.1
_KILL_SECONDS = 10.0


class LeaseLost(Exception):
    """The lease ran out, or a newer attempt owns the job: nothing more may be written."""


class Supervisor:
    def __init__(
        self, settings: Settings, sessions: Sessions, launcher: Launcher, job_id: str, epoch: int
    ) -> None:
        self._settings = settings
        self._sessions = sessions
        self._launcher = launcher
        self._job_id = job_id
        self._epoch = epoch
        self._run = RunDirectory(settings.attempt_dir(job_id, epoch))
        self._terminated = threading.Event()
        self._asked: Literal["pause", "cancel"] | None = None
        self._kill_at = float("inf")
        self._hung = False

    def terminate(self) -> None:
        """Stop at the next step boundary with a checkpoint; another attempt goes on from there."""
        self._terminated.set()

    def run(self) -> None:
        """Raises Fenced or LeaseLost once the ranks are gone, if the job is no longer this attempt's."""
        kills_before = oom_kills()
        exit_code: int | None = None
        launch = self._until_written(self._begin)
        log.info("Attempt %d of %s: %d %s ranks", self._epoch, self._job_id, len(launch.gpus), launch.device)
        ending = self._launch(launch)
        try:
            if ending is None:
                exit_code = self._watch(HangWatch(self._run, len(launch.gpus), self._settings.hang_seconds))
        finally:
            self._stop_ranks()
        self._keeper.ship_the_rest()
        if self._keeper.fenced.is_set():
            raise attempts.fenced(self._job_id, self._epoch)
        if ending is None:
            ending = self._verdict(exit_code, oom_kills() > kills_before)
        self._end(ending)

    def _begin(self, session: Session) -> Launch:
        # Before the lease is taken anew: the keeper counts from here.
        self._keeper = Keeper(self._settings, self._sessions, self._job_id, self._epoch, self._run.path)
        me = sweep.this_process()
        job = attempts.begin(session, self._settings, self._job_id, self._epoch, me.pid, me.start)
        self._inputs = runs.inputs(session, self._settings, job)
        device, gpus = runs.devices(session, job)
        return Launch(self._job_id, self._epoch, self._run.path, device, gpus)

    def _launch(self, launch: Launch) -> Ending | None:
        """Start the ranks, then the keeper; an ending if they can't be started."""
        try:
            self._run.write_run(self._inputs | {"export_dir": str(self._run.export_dir)})
            self._launcher.start(launch)
        except OSError as error:
            return stopped_by(error, "start the ranks")
        finally:
            self._keeper.start()
        return None

    def _watch(self, hang: HangWatch) -> int | None:
        """Until the ranks have ended, which gives an exit code, or must be ended."""
        while (exit_code := self._launcher.poll()) is None:
            if self._keeper.fenced.is_set() or self._keeper.lease_left() <= 0:
                raise LeaseLost(
                    f"Attempt {self._epoch} of {self._job_id} lost its lease; its ranks are ended."
                )
            if self._keeper.broken is not None:
                return None
            if self._stop_if_wanted() and time.monotonic() > self._kill_at:
                log.warning("The ranks did not stop in time; killing them")
                return None
            if hang.hung():
                self._hung = True
                return None
            time.sleep(_POLL_SECONDS)
        return exit_code

    def _stop_if_wanted(self) -> bool:
        wanted: Literal["pause", "cancel"] | None = self._asked
        if self._keeper.desired is Desired.CANCEL:
            wanted = "cancel"
        elif wanted is None and (self._keeper.desired is Desired.PAUSE or self._terminated.is_set()):
            wanted = "pause"
        if wanted is None:
            return False
        if wanted != self._asked:
            log.info("Asking the ranks to stop: %s", wanted)
            self._asked = wanted
            self._kill_at = time.monotonic() + self._settings.stop_grace_seconds
            try:
                self._run.ask(wanted)
            except OSError as error:
                # Without control.json the ranks take the signal for a pause: they stop all the same.
                log.error("control.json could not be written: %s", error)
        self._launcher.request_stop()
        return True

    def _stop_ranks(self) -> None:
        while not self._launcher.stop(_KILL_SECONDS):
            log.error("Some of the attempt's processes can't be killed; their GPUs stay taken until they end")

    def _verdict(self, exit_code: int | None, oom_killed: bool) -> Ending:
        if self._keeper.broken is not None:
            return stopped_by(self._keeper.broken, "record the run")
        evidence = Evidence(
            self._run.outcome(),
            exit_code,
            self._run.log_tail(),
            stopping=self._asked is not None,
            hung=self._hung,
            oom_killed=oom_killed,
        )
        return decide(evidence)

    def _end(self, ending: Ending) -> None:
        try:
            self._until_written(lambda session: self._conclude(session, ending))
        except (OSError, StorageFull) as error:
            # The results file has no room: the model is there, but a success must be whole.
            kept_from = stopped_by(error, "write the results")
            self._until_written(lambda session: self._conclude(session, kept_from))

    def _conclude(self, session: Session, ending: Ending) -> None:
        job = attempts.hold(session, self._job_id, self._epoch)
        if ending.state is State.SUCCEEDED and job.state != State.CANCELLING:
            job.fine_tuned_model = publish_fine_tuned(session, job, self._run.export_dir)
            job.result_file = results.write_results(session, self._settings, job)
        state = attempts.finish(session, self._settings, job, ending)
        log.info("Attempt %d of %s ended: the job is %s", self._epoch, self._job_id, state)

    def _until_written(self, write: Callable[[Session], T]) -> T:
        """One transaction, repeated while the database is away: no rank runs, so waiting harms nobody."""
        while True:
            try:
                with self._sessions.begin() as session:
                    return write(session)
            except OUTAGE as error:
                log.warning("The database does not answer; trying again: %s", error.orig)
                time.sleep(1)


def main(launcher: Launcher | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m worker.supervisor")
    parser.add_argument("--job", required=True)
    parser.add_argument("--epoch", required=True, type=int)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    supervisor = Supervisor(settings(), sessions(), launcher or Torchrun(), arguments.job, arguments.epoch)
    signal.signal(signal.SIGTERM, lambda *_: supervisor.terminate())
    try:
        supervisor.run()
    except (Fenced, LeaseLost) as error:
        log.error("%s", error)
        sys.exit(1)


if __name__ == "__main__":
    main()
