"""Dying with the parent process: a rank must never outlive the launcher that watches it.

``PR_SET_PDEATHSIG`` (Linux ``prctl(2)``) asks the kernel for a signal when the thread that started this
process ends. It survives ``execve`` and is not inherited by children, so every process asks for itself.
"""

import ctypes
import os
import signal
import sys

PARENT_VARIABLE = "SHARDYARD_PARENT"
"""Process id of the launcher, set for everything that the launcher starts."""

_PR_SET_PDEATHSIG = 1


def die_with_parent(expected_parent: int) -> None:
    """Ask for SIGKILL when the parent dies; end at once if it is already gone.

    Call it from the main thread. Raises OSError where the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl(PR_SET_PDEATHSIG): {os.strerror(error)}")
    # The parent may have died before the request: then nobody would send the signal.
    if os.getppid() != expected_parent:
        os.kill(os.getpid(), signal.SIGKILL)


def main(arguments: list[str]) -> None:
    """``python -m zero_core.training.parent_death PARENT COMMAND...``: become COMMAND, bound to PARENT.

    The command keeps this process's id, so its own children know from the environment whom to die with.
    """
    die_with_parent(int(arguments[0]))
    environment = os.environ | {PARENT_VARIABLE: str(os.getpid())}
    os.execve(arguments[1], arguments[1:], environment)


if __name__ == "__main__":
    main(sys.argv[1:])
