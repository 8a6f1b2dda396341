"""The parts of this worker process, put together once."""

import threading
from dataclasses import dataclass
from functools import cache

from jobs.database import sessions
from jobs.settings import settings
from jobs.wake import CLAIM_TASK
from worker.celery_app import app
from worker.host import this_host
from worker.relay import Relay
from worker.sweeper import Sweeper


@dataclass(frozen=True)
class Runtime:
    sweeper: Sweeper
    relay: Relay

    def start(self) -> None:
        """Sweep and relay in the background until the process ends."""
        for work in (self.sweeper.run_forever, self.relay.run_forever):
            threading.Thread(target=work, daemon=True).start()


@cache
def runtime() -> Runtime:
    host = this_host(settings())
    return Runtime(
        Sweeper(settings(), sessions(), host),
        Relay(settings(), sessions(), publish),
    )


def publish(job_id: str) -> None:
    """Send the hint. Raises kombu's OperationalError when the broker is down."""
    app.send_task(CLAIM_TASK, args=[job_id])
