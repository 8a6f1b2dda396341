"""A process of the stack: its log, its end with ours, its restart when it dies."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from shardyard.stack.errors import StackError

FIRST_PAUSE = 0.5
LONGEST_PAUSE = 30.0
"""Bounds of the pause, in seconds, from a death to the restart."""

TAIL_BYTES = 4000


def bound(command: list[str]) -> list[str]:
    """The same command, which the kernel ends when this process ends, however that happens."""
    return [sys.executable, "-m", "zero_core.training.parent_death", str(os.getpid()), *command]


class Backoff:
    """The pause doubles with each death, until a child has lived for longer than the longest."""

    def __init__(self) -> None:
        self._pause = FIRST_PAUSE

    def after(self, lived: float) -> float:
        """Seconds to wait before the restart of a child that lived for so many."""
        pause = FIRST_PAUSE if lived > LONGEST_PAUSE else self._pause
        self._pause = min(2 * pause, LONGEST_PAUSE)
        return pause


class Child:
    """``options`` go to ``subprocess.Popen``; ``stop_signal`` asks the program for a clean end."""

    def __init__(
        self,
        name: str,
        command: list[str],
        environment: dict[str, str],
        log_dir: Path,
        *,
        options: dict[str, Any] | None = None,
        stop_signal: signal.Signals = signal.SIGTERM,
    ) -> None:
        self.name = name
        self.log = log_dir / f"{name}.log"
        self._command = command
        self._environment = environment
        self._options = options or {}
        self._stop_signal = stop_signal
        self._process: subprocess.Popen[bytes] | None = None
        self._started = 0.0
        self._restart_at: float | None = None
        self._backoff = Backoff()

    def start(self) -> None:
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                self._command,
                **self._options,
                env=self._environment,
                # Python puts the directory it starts in before its packages: a user's own api/ or jobs/
                # must not take the place of ours.
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                # Ctrl-C reaches the terminal's foreground group; stopping in order is ours.
                process_group=0,
            )
        self._started = time.monotonic()
        self._restart_at = None

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
        now = time.monotonic()
        if self._restart_at is None:
            self._restart_at = now + self._backoff.after(now - self._started)
        if now < self._restart_at:
            return False
        self.start()
        return True

    def stop(self, seconds: float = 10.0) -> None:
        if self._process is None:
            return
        self._process.send_signal(self._stop_signal)
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def _log_tail(self) -> str:
        return self.log.read_bytes()[-TAIL_BYTES:].decode(errors="replace")
