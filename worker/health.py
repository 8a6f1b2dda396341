"""``python -m worker.health``: whether this host's worker sweeps, for a health check.

A worker says so in the database at every sweep; its process alone proves nothing.
"""

import sys
from datetime import timedelta

from sqlalchemy import func, select

from jobs.database import sessions
from jobs.settings import settings
from jobs.tables import Host
from worker.host import this_host

MISSED_SWEEPS = 10
"""Sweeps that a healthy worker may be late: one may wait for a database that is slow."""


def sweeps() -> bool:
    oldest = func.now() - timedelta(seconds=MISSED_SWEEPS * settings().sweep_seconds)
    with sessions().begin() as session:
        seen = select(Host.host).where(Host.host == this_host(settings()).name, Host.seen_at > oldest)
        return session.scalar(seen) is not None


if __name__ == "__main__":
    sys.exit(0 if sweeps() else 1)
