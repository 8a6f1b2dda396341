"""A hint to the workers that a job waits. Losing one costs a few seconds and never a job."""

import logging
from functools import cache

from celery import Celery

from jobs.settings import Settings, settings

log = logging.getLogger(__name__)

CLAIM_TASK = "worker.claim"
"""Takes a job's id: the worker that gets it claims the job."""

WAKE_QUEUE = "shardyard.wake"


def broker_url(settings: Settings) -> str:
    """Celery's spelling of the broker's address: a unix socket is ``redis+socket`` there."""
    return settings.redis_url.replace("unix://", "redis+socket://", 1)


def wake(job_id: str) -> None:
    """Publish the hint, for about two seconds at most; a broker that is down is only logged."""
    try:
        _publisher().send_task(CLAIM_TASK, args=[job_id], queue=WAKE_QUEUE)
    except Exception as error:
        log.warning("The broker does not answer, so job %s waits for the next sweep: %s", job_id, error)


@cache
def _publisher() -> Celery:
    """Sends by name: whoever publishes imports nothing of the worker."""
    app = Celery("shardyard", broker=broker_url(settings()), set_as_current=False)
    app.conf.update(
        task_ignore_result=True,
        task_serializer="json",
        task_publish_retry_policy={
            "max_retries": 2,
            "interval_start": 0.1,
            "interval_step": 0.2,
            "interval_max": 0.5,
        },
        broker_transport_options={"socket_connect_timeout": 0.5, "socket_timeout": 0.5},
    )
    return app
