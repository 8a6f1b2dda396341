"""The stack as a whole: start in order, watch, stop in the opposite order."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import httpx

from shardyard.stack import attempts
from shardyard.stack.broker import Broker
from shardyard.stack.child import Child, bound
from shardyard.stack.errors import StackError
from shardyard.stack.lock import DataLock
from shardyard.stack.postgres import Postgres

DEFAULT_PORT = 8321
START_SECONDS = 60.0
"""From the start of a part until it must answer."""

WATCH_SECONDS = 0.5
ATTEMPTS_SECONDS = 60.0
"""How long attempts that run may take to write a checkpoint when the stack stops."""

WORKER = "worker"


class Stack:
    """PostgreSQL and a broker where the environment names none, the API, and one worker.

    ``say`` gets a line about each part that starts or is restarted.
    """

    def __init__(
        self,
        data_dir: Path,
        host: str = "127.0.0.1",
        port: int = DEFAULT_PORT,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.data_dir = data_dir.resolve()
        self.url = f"http://{_reached_at(host)}:{port}"
        self._host = host
        self._port = port
        self._say = say
        self._lock = DataLock(self.data_dir)
        self._postgres: Postgres | None = None
        self._children: list[Child] = []
        self._stop_requested = False

    @property
    def client_file(self) -> Path:
        return self.data_dir / "client.json"

    # Start.

    def start(self) -> None:
        """Every part answers when this returns. Raises StackError and leaves nothing running otherwise."""
        self._make_data_dir()
        self._lock.acquire(self.url)
        try:
            _check_port(self._host, self._port)
            environment = self._start_servers()
            self._bootstrap(environment)
            self._start_service(environment)
        except BaseException:
            self.stop()
            raise

    def _make_data_dir(self) -> None:
        try:
            self.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._log_dir.mkdir(exist_ok=True)
        except OSError as error:
            raise StackError(
                f"{self.data_dir} can't be used: {error}. Choose another --data directory."
            ) from error

    @property
    def _log_dir(self) -> Path:
        return self.data_dir / "log"

    def _start_servers(self) -> dict[str, str]:
        """PostgreSQL and the broker, each unless the environment names one; the service's environment."""
        environment = {**os.environ, "SHARDYARD_DATA_DIR": str(self.data_dir)}
        if "DATABASE_URL" not in environment:
            self._postgres = Postgres(self.data_dir / "postgres", environment, self._log_dir)
            for folder in self._postgres.prepare():
                self._say(f"{folder} lets other accounts pass now: PostgreSQL does not run as root")
            self._start_child(self._postgres.child, self._postgres.answers)
            environment["DATABASE_URL"] = self._postgres.url
        if "REDIS_URL" not in environment:
            broker = Broker(self.data_dir / "broker", environment, self._log_dir)
            self._start_child(broker.child, broker.answers)
            environment["REDIS_URL"] = broker.url
        return environment

    def _bootstrap(self, environment: dict[str, str]) -> None:
        command = [sys.executable, "-m", "jobs.bootstrap"]
        options = ["--client-file", str(self.client_file), "--url", self.url]
        done = subprocess.run(
            [*command, *options], env=environment, cwd="/", capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise StackError(f"The database could not be prepared:\n{done.stderr[-2000:]}")

    def _start_service(self, environment: dict[str, str]) -> None:
        address = ["--host", self._host, "--port", str(self._port)]
        api = [sys.executable, "-m", "uvicorn", "api.main:app", *address, "--no-access-log"]
        self._start_child(Child("api", bound(api), environment, self._log_dir), self._answers)
        worker = [sys.executable, "-m", "worker"]
        self._start_child(Child(WORKER, bound(worker), environment, self._log_dir), lambda: True)

    def _start_child(self, child: Child, answers: Callable[[], bool]) -> None:
        child.start()
        self._children.append(child)
        deadline = time.monotonic() + START_SECONDS
        while not answers():
            child.check_alive()
            if self._stop_requested:
                raise StackError(f"Stopped while {child.name} was starting.")
            if time.monotonic() > deadline:
                raise StackError(f"{child.name} did not answer in {START_SECONDS:.0f} s; see {child.log}")
            time.sleep(0.05)
        self._say(f"{child.name} is up")

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/healthz", timeout=2).status_code == 200
        except httpx.TransportError:
            return False

    # Run and stop.

    def wait(self) -> None:
        """Until ``request_stop``; children that die meanwhile are started again."""
        while not self._stop_requested:
            for child in self._children:
                if child.restart_if_dead():
                    self._say(f"{child.name} had died and was started again; see {child.log}")
            time.sleep(WATCH_SECONDS)

    def request_stop(self, *_: object) -> None:
        """A signal handler: ends ``wait``, or a ``start`` that still waits for a part."""
        self._stop_requested = True

    def stop(self) -> None:
        """The worker first, so that nothing new starts; then the attempts; the database last."""
        self._stop_requested = False
        if self._children and self._children[-1].name == WORKER:
            self._children.pop().stop()
        # Also where the start failed: attempts that a killed stack left need the database that ends now.
        if self._children:
            self._stop_attempts()
        while self._children:
            self._children.pop().stop()
        if self._postgres is not None:
            self._postgres.clean_up()
            self._postgres = None
        self._lock.release()

    def _stop_attempts(self) -> None:
        """Each writes a checkpoint. One that takes too long ends by itself, when it can't renew its lease."""
        left = attempts.running(self.data_dir)
        if not left:
            return
        self._say(
            f"{len(left)} running attempt(s) write a checkpoint and stop; their jobs go on from it when the "
            "service runs again. Ctrl-C again does not wait for that."
        )
        attempts.ask_to_stop(left)
        deadline = time.monotonic() + ATTEMPTS_SECONDS
        while left and time.monotonic() < deadline and not self._stop_requested:
            time.sleep(0.05)
            left = attempts.still_running(left)

    def __enter__(self) -> "Stack":
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


def _reached_at(host: str) -> str:
    """Where a client on this machine finds a server that listens at ``host``."""
    here = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{here}]" if ":" in here else here


def _check_port(host: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise StackError(
                f"{host}:{port} can't be used: {error.strerror}. Choose another with --port, or stop what "
                "listens there."
            ) from error
