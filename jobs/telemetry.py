"""Memory and metrics of a job, step by step."""

from sqlalchemy import select
from sqlalchemy.orm import Session

from jobs.queries import get_job
from jobs.tables import Metric, Telemetry


def telemetry(
    session: Session, team_id: str, job_id: str, after_step: int = -1, limit: int = 1000
) -> tuple[list[Telemetry], list[Metric]]:
    """Memory of each rank, and metrics, of the ``limit`` steps that follow ``after_step``; oldest first.

    Steps beyond the job's own are left out: an attempt that was lost had done them, and they will be done
    again.
    """
    job = get_job(session, team_id, job_id)
    metrics = list(
        session.scalars(
            select(Metric)
            .where(Metric.job_id == job.id, Metric.step > after_step, Metric.step <= job.step)
            .order_by(Metric.step)
            .limit(limit)
        )
    )
    if not metrics:
        return [], []
    memory = session.scalars(
        select(Telemetry)
        .where(Telemetry.job_id == job.id, Telemetry.step > after_step, Telemetry.step <= metrics[-1].step)
        .order_by(Telemetry.step, Telemetry.rank)
    )
    return list(memory), metrics
