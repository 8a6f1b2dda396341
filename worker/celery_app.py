"""The Celery app: it carries hints to claim a job, and nothing else.

The database is the only truth, so every message may be lost, doubled or late: a claim finds the job still
queued or does nothing, and the sweep finds a job that no message announced.
"""

from typing import Any

from celery import Celery

from jobs.settings import settings
from jobs.wake import WAKE_QUEUE, broker_url

TICK_TASK = "worker.tick"


def configuration() -> dict[str, Any]:
    return {
        "broker_url": broker_url(settings()),
        "task_default_queue": WAKE_QUEUE,
        # Results live in the database; nothing reads a message's.
        "task_ignore_result": True,
        # Early: a message is a hint, and one that is redelivered after a crash is worth nothing.
        "task_acks_late": False,
        # Re-queuing the message of a worker that died loops for ever if the message is what kills it.
        "task_reject_on_worker_lost": False,
        # Messages reserved by one worker would wait for it, and be redelivered after the visibility timeout.
        "worker_prefetch_multiplier": 1,
        "worker_disable_prefetch": True,
        # Pickle is remote code execution for whoever reaches the broker.
        "accept_content": ["json"],
        "task_serializer": "json",
        # The broker may be away for any time: the sweep goes on, and the consumer returns when it does.
        "broker_connection_retry_on_startup": True,
        "broker_connection_max_retries": None,
        "broker_connection_timeout": 2,
        "redis_socket_keepalive": True,
        "broker_transport_options": {
            "health_check_interval": 10,
            "socket_keepalive": True,
            "socket_connect_timeout": 2,
        },
        # About two seconds, then the outbox keeps the message.
        "task_publish_retry_policy": {
            "max_retries": 3,
            "interval_start": 0.1,
            "interval_step": 0.3,
            "interval_max": 1.0,
        },
        # Claims are short and few; threads let a worker hold its sweeper in the same process.
        "worker_pool": "threads",
        "worker_concurrency": 2,
        # Nobody may terminate a task from afar, and idle workers have nothing to tell each other.
        "worker_enable_remote_control": False,
        "worker_hijack_root_logger": False,
        # A tick that nobody took before the next one is worthless: workers also sweep by themselves.
        "beat_schedule": {
            "sweep": {
                "task": TICK_TASK,
                "schedule": settings().sweep_seconds,
                "options": {"expires": settings().sweep_seconds},
            }
        },
        # In memory: there is nothing to remember, and the default keeps its times in a pickle.
        "beat_scheduler": "celery.beat:Scheduler",
    }


app = Celery("shardyard", include=["worker.tasks"])
# Read when first needed: importing this module asks for no environment.
app.add_defaults(configuration)
