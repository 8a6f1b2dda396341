"""Starting the ranks of one run, and getting an answer or a reason from them in bounded time."""

import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from pydantic import TypeAdapter

from bench.task import Measurement, Task
from zero_core.training.parent_death import PARENT_VARIABLE

ROOT = Path(__file__).parents[1]

_POLL_SECONDS = 0.1

_RAISED = re.compile(
    r"^(?:\[rank\d+\]: )?([\w.]+(?:Error|Exception|Exit|Mismatch|Failed)\b.*)$", re.MULTILINE
)

_ABORTED = re.compile(
    r"terminate called|  what\(\)|Fatal Python error|.*\b(?:malloc|free|corrupted)\b|  File "
)
"""What C++, Python and glibc say before they abort, and where Python was."""


class RunFailed(Exception):
    """A run gave no measurement; the message is the first failed rank's last word."""


def run_ranks(task: Task, timeout_seconds: float) -> Measurement:
    """Run ``task`` on processes of its own, on loopback. Raises RunFailed; no rank outlives the call."""
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        (folder / "task.json").write_bytes(TypeAdapter(Task).dump_json(task))
        ranks = _start(folder, task.case.ranks)
        try:
            _wait(ranks, folder, timeout_seconds)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        return TypeAdapter(Measurement).validate_json((folder / "answer.json").read_bytes())


def _start(folder: Path, ranks: int) -> list[subprocess.Popen[bytes]]:
    shared = {
        "GLOO_SOCKET_IFNAME": "lo",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "OMP_NUM_THREADS": "1",
        # A rank that a signal ends says where it was.
        "PYTHONFAULTHANDLER": "1",
        "PYTHONPATH": str(ROOT),
        PARENT_VARIABLE: str(os.getpid()),
    }
    command = [sys.executable, "-m", "bench.rank", str(folder / "task.json"), str(folder / "answer.json")]
    started: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(ranks):
            with (folder / f"rank-{rank}.log").open("wb") as log:
                environment = os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                started.append(
                    subprocess.Popen(
                        command, env=environment, cwd=folder, stdout=log, stderr=subprocess.STDOUT
                    )
                )
    except OSError:
        for process in started:
            process.kill()
            process.wait()
        raise
    return started


def _wait(ranks: list[subprocess.Popen[bytes]], folder: Path, timeout_seconds: float) -> None:
    deadline = time.monotonic() + timeout_seconds
    while True:
        codes = [rank.poll() for rank in ranks]
        for rank, code in enumerate(codes):
            if code:
                log = (folder / f"rank-{rank}.log").read_text("utf-8", "replace")
                raise RunFailed(f"rank {rank}: {last_word(log, code)}")
        if all(code == 0 for code in codes):
            return
        if time.monotonic() > deadline:
            raise RunFailed(f"timed out after {timeout_seconds:g} s")
        time.sleep(_POLL_SECONDS)


def last_word(text: str, code: int) -> str:
    """What ended a process that printed ``text``, without directories of this machine: its exception, or what
    a signal left."""
    errors = _RAISED.findall(text)
    if errors:
        return _without_directories(errors[-1])
    if code >= 0:
        return f"exit status {code}"
    said = [line for line in text.splitlines() if _ABORTED.match(line)]
    return ": ".join([f"signal {-code}", *map(_without_directories, said[:3])])


def _without_directories(text: str) -> str:
    return re.sub(r"(?:/[\w.+-]+)+/", "", text.strip())


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
