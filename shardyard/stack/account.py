"""The account that PostgreSQL runs under: it refuses to run as root, so root gives it one of its own."""

import os
import pwd
import stat
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardyard.stack.errors import StackError

NAME = "pgserver"


@dataclass(frozen=True)
class Account:
    name: str
    uid: int
    gid: int

    def own(self, path: Path) -> None:
        os.chown(path, self.uid, self.gid)


def caller_name() -> str:
    """The name of this process's account, which PostgreSQL asks for too."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        raise StackError(
            f"User id {os.geteuid()} has no name on this machine, and PostgreSQL needs one. Add the user, "
            "or set DATABASE_URL to a server of your own."
        ) from None


def server_account() -> Account | None:
    """None where the server runs under the caller's own account."""
    if os.geteuid() != 0:
        return None
    try:
        entry = pwd.getpwnam(NAME)
    except KeyError:
        _add(NAME)
        entry = pwd.getpwnam(NAME)
    return Account(entry.pw_name, entry.pw_uid, entry.pw_gid)


def popen_options(account: Account | None) -> dict[str, Any]:
    """What makes ``subprocess`` start a program under the account."""
    if account is None:
        return {}
    return {"user": account.uid, "group": account.gid, "extra_groups": []}


def let_through(path: Path) -> list[Path]:
    """Let every account pass through the folders above ``path``, without seeing what they hold.

    Returns the folders whose mode was changed.
    """
    return [folder for folder in path.parents if _allow(folder, stat.S_IXOTH)]


def let_read(folder: Path) -> None:
    """Let every account read and run what a folder holds: it may have been installed for root alone."""
    for path in [folder, *folder.rglob("*")]:
        runs = path.is_dir() or path.stat().st_mode & stat.S_IXUSR
        _allow(path, stat.S_IROTH | stat.S_IXOTH if runs else stat.S_IROTH)


def _allow(path: Path, bits: int) -> bool:
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & bits == bits:
        return False
    path.chmod(mode | bits)
    return True


def _add(name: str) -> None:
    command = ["useradd", "--system", "--no-create-home", "--shell", "/usr/sbin/nologin", name]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        reason = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else error
        raise StackError(
            f"PostgreSQL does not run as root, and the user {name} could not be added: {reason}. Start the "
            "stack as another user, or set DATABASE_URL to a server of your own."
        ) from error
