"""``shardyard up`` as a user starts it."""

import contextlib
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import psutil

from tests.e2e.conftest import eventually

PARTS = {"api.main:app": "api", "-m worker": "worker", "-server": "broker", "bin/postgres": "postgres"}
"""Each part's name, by what only its command line has."""


class Up:
    def __init__(self, data_dir: Path, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.data_dir = data_dir
        self.process = subprocess.Popen(
            [sys.executable, "-m", "shardyard", "up", "--data", str(data_dir), "--port", str(port)],
            stdout=subprocess.DEVNULL,
        )

    def wait_until_all_run(self) -> None:
        eventually(self.answers, "the API answers")
        eventually(lambda: self.children().keys() == set(PARTS.values()), "all parts run")

    def answers(self) -> bool:
        assert self.process.poll() is None
        try:
            return httpx.get(f"{self.url}/healthz", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def children(self) -> dict[str, psutil.Process]:
        """The stack's processes by what they run."""
        found = {}
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):
                line = " ".join(child.cmdline())
                found |= {name: child for part, name in PARTS.items() if part in line}
        return found

    def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout=90)
