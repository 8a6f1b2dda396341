"""Bringing everything that an attempt's ranks have written into the database."""

from collections.abc import Callable
from pathlib import Path

from sqlalchemy.orm import Session, sessionmaker

from jobs import attempts, shipping
from jobs.state import Desired


def drain(
    sessions: sessionmaker[Session],
    job_id: str,
    epoch: int,
    attempt_dir: Path,
    heard: Callable[[Desired], object],
) -> None:
    """Ship whole lines until none is left; ``heard`` is told what the user wants before each batch.

    No transaction is open while files are read. Raises Fenced where the attempt no longer owns the job.
    """
    while True:
        with sessions.begin() as session:
            desired = attempts.heed(session, job_id, epoch)
            offsets = shipping.offsets(session, job_id, epoch)
        heard(desired)
        chunks = shipping.read(attempt_dir, offsets)
        if not chunks:
            return
        with sessions.begin() as session:
            shipping.ship(session, job_id, epoch, chunks)
