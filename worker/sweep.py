"""Finding every process of an attempt, and proving that none is left.

torchrun gives each rank a session of its own, so a process group is not enough: what identifies a process
of an attempt is ``SHARDYARD_ATTEMPT`` in the environment that it was started with. A pid alone is reused;
pid plus start time is not.
"""

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ATTEMPT_VARIABLE = "SHARDYARD_ATTEMPT"

_POLL_SECONDS = 0.02


@dataclass(frozen=True)
class ProcessIdentity:
    pid: int
    start: int
    """Clock ticks from boot to the process's start."""

    def gone(self) -> bool:
        """Ended, or a zombie: it runs nothing and holds no device."""
        return start_time(self.pid) != self.start

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal; one that is gone is left alone."""
        try:
            handle = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return
        # The handle is the process that had this pid when it was opened: checking after opening closes the
        # gap in which the pid could have been given to another process.
        try:
            if not self.gone():
                signal.pidfd_send_signal(handle, number)
        except ProcessLookupError:
            pass
        finally:
            os.close(handle)


def attempt_tag(job_id: str, epoch: int) -> str:
    """Value of ``SHARDYARD_ATTEMPT`` in every process of the attempt."""
    return f"{job_id}-{epoch}"


def start_time(pid: int) -> int | None:
    """Start of a process in clock ticks since boot; None for one that is gone or a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command's name, in parentheses, may hold spaces and parentheses itself.
    fields = stat[stat.rindex(b")") + 2 :].split()
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def this_process() -> ProcessIdentity:
    start = start_time(os.getpid())
    assert start is not None
    return ProcessIdentity(os.getpid(), start)


def processes(tag: str) -> list[ProcessIdentity]:
    """Every process of the attempt, this one left out."""
    return [identity for identity, _ in _tagged(tag)]


def ranks(tag: str) -> list[ProcessIdentity]:
    """The attempt's training processes: those that torchrun gave a ``RANK``."""
    return [identity for identity, environment in _tagged(tag) if b"RANK" in environment]


def kill_all(tag: str, timeout: float) -> bool:
    """SIGKILL until a look over all processes finds none of the attempt; False if some are left in time."""
    deadline = time.monotonic() + timeout
    while found := processes(tag):
        for process in found:
            process.signal(signal.SIGKILL)
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True


def _tagged(tag: str) -> Iterator[tuple[ProcessIdentity, dict[bytes, bytes]]]:
    wanted = tag.encode()
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        pid = int(entry.name)
        environment = _environment(pid)
        if environment.get(ATTEMPT_VARIABLE.encode()) == wanted:
            start = start_time(pid)
            if start is not None:
                yield ProcessIdentity(pid, start), environment


def _environment(pid: int) -> dict[bytes, bytes]:
    try:
        block = Path(f"/proc/{pid}/environ").read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        # Gone, or another user's: an attempt's processes run as the worker's user.
        return {}
    return dict(line.split(b"=", 1) for line in block.split(b"\0") if b"=" in line)
