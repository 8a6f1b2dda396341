"""What the messages do. Each returns within a second or two: no training run lives inside a task."""

from jobs.wake import CLAIM_TASK
from worker.celery_app import TICK_TASK, app
from worker.runtime import runtime


@app.task(name=CLAIM_TASK)
def claim(job_id: str) -> None:
    """Claim the job for this host if it is still waiting and fits, and start its supervisor."""
    runtime().sweeper.dispatcher.claim(job_id)


@app.task(name=TICK_TASK)
def tick() -> None:
    """The same pass that every worker makes by itself: beat may run twice or not at all."""
    runtime().relay.relay()
    runtime().sweeper.sweep()
