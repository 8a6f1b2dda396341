"""Attempts that run while the stack stops.

Each has a supervisor that outlives the worker. Asked by SIGTERM, it lets its ranks write a checkpoint and
end, and puts the job back into the queue, where the next stack finds it. That needs the database: so it
comes before the database's own end.
"""

import contextlib
from pathlib import Path

import psutil

from shardyard.stack.processes import lives

MODULE = "worker.supervisor"


def running(data_dir: Path) -> list[psutil.Process]:
    """The supervisors of attempts in this data directory."""
    return [process for process in psutil.process_iter() if _is_ours(process, data_dir)]


def ask_to_stop(supervisors: list[psutil.Process]) -> None:
    for supervisor in supervisors:
        with contextlib.suppress(psutil.NoSuchProcess):
            supervisor.terminate()


def still_running(supervisors: list[psutil.Process]) -> list[psutil.Process]:
    return [supervisor for supervisor in supervisors if lives(supervisor)]


def _is_ours(process: psutil.Process, data_dir: Path) -> bool:
    try:
        return MODULE in process.cmdline() and process.environ().get("SHARDYARD_DATA_DIR") == str(data_dir)
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False
