"""What an attempt came to, from everything that it left behind. Pure."""

import errno
import re
from dataclasses import dataclass

from jobs.attempts import Ending
from jobs.errors import StorageFull
from jobs.state import Reason, State
from worker.run_directory import Outcome

_OUT_OF_MEMORY = re.compile(
    r"OutOfMemoryError|CUDA out of memory|DefaultCPUAllocator: (can't|not enough)|MemoryError"
)
_KILLED = re.compile(r"exitcode\s*: -9\b")
"""What torchrun says of a rank that SIGKILL ended, other than by torchrun itself."""
_DISK_FULL = re.compile(r"No space left on device|Errno 28\b")

_STATUS = {"succeeded": State.SUCCEEDED, "paused": State.PAUSED, "cancelled": State.CANCELLED}
_REASON = {"paused": Reason.PAUSED_BY_USER, "cancelled": Reason.CANCELLED_BY_USER}


def out_of_room(error: Exception) -> bool:
    """A disk that is full, or a quota of it."""
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    return full or isinstance(error, StorageFull)


def stopped_by(error: Exception, what: str) -> Ending:
    """The ending where the attempt itself did not fail but ``error`` kept the host from doing ``what``."""
    reason = Reason.DISK_FULL if out_of_room(error) else Reason.CRASHED
    return Ending(State.FAILED, reason, f"The host could not {what}: {error}")


@dataclass(frozen=True)
class Evidence:
    outcome: Outcome | None
    exit_code: int | None
    """Of the launcher; None where the supervisor ended it itself."""
    log_tail: str
    stopping: bool = False
    """The ranks had been asked to stop."""
    hung: bool = False
    """A rank made no progress for too long and was killed."""
    oom_killed: bool = False
    """The kernel killed a process for memory while the attempt ran: not always one of this attempt."""


def decide(evidence: Evidence) -> Ending:
    """The ranks' own word goes first; without one, or with no more than a crash, the traces decide."""
    outcome = evidence.outcome
    if outcome is not None and outcome.status != "failed":
        reason = _REASON.get(outcome.status)
        return Ending(_STATUS[outcome.status], reason, exit_code=evidence.exit_code)
    if evidence.stopping and outcome is None:
        # Asked to stop and then killed, before or after the grace: nobody's fault.
        return Ending(State.RETRY_WAIT, exit_code=evidence.exit_code, blame=False)
    said = _reason(outcome)
    if outcome is not None and said not in (Reason.CRASHED, Reason.LOST):
        return Ending(State.FAILED, said, outcome.message, outcome.param, evidence.exit_code)
    reason, message = _traces(evidence)
    if outcome is not None and reason is Reason.CRASHED:
        reason, message = said, outcome.message or message
    return Ending(State.FAILED, reason, message, exit_code=evidence.exit_code)


def _reason(outcome: Outcome | None) -> Reason:
    known = {str(reason) for reason in Reason}
    return Reason(outcome.reason) if outcome is not None and outcome.reason in known else Reason.CRASHED


def _traces(evidence: Evidence) -> tuple[Reason, str]:
    if evidence.hung:
        return Reason.HUNG, "A rank made no progress for too long and was ended."
    if evidence.oom_killed and (evidence.exit_code == -9 or _KILLED.search(evidence.log_tail)):
        return Reason.OOM, "the host's memory was used up, and the kernel ended a rank"
    if _DISK_FULL.search(evidence.log_tail):
        return (
            Reason.DISK_FULL,
            "The data directory's disk is full. Free some room and start the job again.",
        )
    if _OUT_OF_MEMORY.search(evidence.log_tail):
        return Reason.OOM, "out of memory on a rank"
    return (
        Reason.CRASHED,
        f"The ranks ended without a result (exit code {evidence.exit_code}); see the attempt's log.",
    )
