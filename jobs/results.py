"""The results file of a job: its metrics as OpenAI's CSV."""

import csv
import io

from sqlalchemy import select
from sqlalchemy.orm import Session

from jobs.files import RESULTS, record_file, store_produced
from jobs.settings import Settings
from jobs.tables import Job, Metric

COLUMNS = ("step", "train_loss", "train_accuracy", "valid_loss", "valid_mean_token_accuracy")


def write_results(session: Session, settings: Settings, job: Job) -> str:
    """Make the file, or find the one that was made before; its id."""
    if job.result_file is not None:
        return job.result_file
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for metric in session.scalars(select(Metric).where(Metric.job_id == job.id).order_by(Metric.step)):
        values = (metric.train_loss, metric.train_accuracy, metric.valid_loss, metric.valid_accuracy)
        writer.writerow([metric.step, *("" if value is None else repr(value) for value in values)])
    stored = store_produced(settings, text.getvalue().encode(), "step_metrics.csv", RESULTS)
    return record_file(session, job.team_id, stored).id
