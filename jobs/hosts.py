"""Worker hosts and the devices that their ranks can have."""

from sqlalchemy import delete, func, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from jobs.tables import Attempt, Gpu, Host


def register(session: Session, host: str, boot_id: str, device: str, slots: int) -> None:
    """Say that the host is there with so many devices. A device in use stays in use."""
    seen = {"boot_id": boot_id, "device": device, "slots": slots, "seen_at": func.now()}
    session.execute(
        insert(Host).values(host=host, **seen).on_conflict_do_update(index_elements=["host"], set_=seen)
    )
    if slots:
        rows = [{"host": host, "idx": idx} for idx in range(slots)]
        session.execute(insert(Gpu).values(rows).on_conflict_do_nothing())
    session.execute(delete(Gpu).where(Gpu.host == host, Gpu.idx >= slots, Gpu.attempt_id.is_(None)))


def abandoned(session: Session, host: str) -> list[tuple[str, int]]:
    """Job and epoch of attempts that have ended and still hold devices of this host.

    They were ended from elsewhere; the host gives the devices back once no process of theirs is left.
    """
    holding = select(Gpu.attempt_id).where(Gpu.host == host, Gpu.attempt_id.is_not(None))
    ended = select(Attempt).where(Attempt.id.in_(holding), Attempt.ended_at.is_not(None))
    return [(attempt.job_id, attempt.epoch) for attempt in session.scalars(ended)]


def release(session: Session, host: str, job_id: str, epoch: int) -> None:
    """Give back the devices of an attempt that has ended and of which no process is left."""
    ended = select(Attempt.id).where(
        Attempt.job_id == job_id, Attempt.epoch == epoch, Attempt.ended_at.is_not(None)
    )
    session.execute(update(Gpu).where(Gpu.host == host, Gpu.attempt_id.in_(ended)).values(attempt_id=None))
