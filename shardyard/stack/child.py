"""A process of the stack: its log, its end with ours, its restart when it dies."""

import os
import subprocess
import sys
import time
from pathlib import Path

from shardyard.stack.errors import StackError

FIRST_PAUSE = 0.5
LONGEST_PAUSE = 30.0
"""Seconds between restarts: doubled each time, until the child has lived for as long again."""

TAIL_BYTES = 4000


class Child:
    """``python -m zero_core.parent_death`` makes the kernel end the child when this process ends."""

    def __init__(self, name: str, command: list[str], environment: dict[str, str], log_dir: Path) -> None:
        self.name = name
        self.log = log_dir / f"{name}.log"
        self._command = [sys.executable, "-m", "zero_core.parent_death", str(os.getpid()), *command]
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None
        self._started = 0.0
        self._pause = FIRST_PAUSE

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                self._command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                # Ctrl-C reaches the terminal's foreground group; stopping in order is ours.
                process_group=0,
            )
        self._started = time.monotonic()

    def check_alive(self) -> None:
        """Raise StackError, with the end of its log, where the child has ended."""
        if self._process is not None and self._process.poll() is not None:
            raise StackError(
                f"{self.name} ended with exit code {self._process.returncode} as it started. "
                f"The end of {self.log}:\n{self._log_tail()}"
            )

    def restart_if_dead(self) -> bool:
        """True if it had died and was started again; a child that keeps dying is restarted ever later."""
        if self._process is None or self._process.poll() is None:
            return False
        lived = time.monotonic() - self._started
        if lived < self._pause:
            return False
        self._pause = FIRST_PAUSE if lived > LONGEST_PAUSE else min(2 * self._pause, LONGEST_PAUSE)
        self.start()
        return True

    def stop(self, seconds: float = 10.0) -> None:
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def _log_tail(self) -> str:
        return self.log.read_bytes()[-TAIL_BYTES:].decode(errors="replace")
