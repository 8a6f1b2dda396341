"""Processes that are not this one's children."""

import psutil


def lives(process: psutil.Process) -> bool:
    """A zombie has ended: not every init of a container collects what its parent left behind."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
