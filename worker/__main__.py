"""``python -m worker``: one worker of this host. It consumes wake messages and sweeps.

Supervisors are processes of their own: ending this one, in whatever way, touches no training run.
"""

import logging

from worker.celery_app import app
from worker.runtime import runtime


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    # Before the consumer, which waits for the broker: the sweep needs the database only.
    runtime().start()
    app.worker_main(
        ["worker", "--loglevel=INFO", "--without-gossip", "--without-mingle", "--without-heartbeat"]
    )


if __name__ == "__main__":
    main()
