"""Wake messages that committed with what they announce, waiting to be published."""

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from jobs.tables import Outbox

BATCH = 100


def pending(session: Session) -> list[tuple[int, str]]:
    """Row id and job id of the oldest messages, a bounded batch."""
    rows = session.execute(select(Outbox.id, Outbox.job_id).order_by(Outbox.id).limit(BATCH))
    return [(row.id, row.job_id) for row in rows]


def delete_published(session: Session, ids: list[int]) -> None:
    session.execute(delete(Outbox).where(Outbox.id.in_(ids)))
