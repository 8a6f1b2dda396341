"""``shardyard checkpoints``."""

import typer

from shardyard.cli.jobs import JobId
from shardyard.cli.output import AsJson, moment, print_json, print_table, size
from shardyard.client import Shardyard

app = typer.Typer(no_args_is_help=True)


@app.callback()
def checkpoints() -> None:
    """A group also with one command."""


@app.command()
def ls(job_id: JobId, as_json: AsJson = False) -> None:
    """List the checkpoints that a job has, newest first."""
    with Shardyard() as client:
        found = list(client.jobs.checkpoints(job_id))
    if as_json:
        print_json(found)
        return
    rows = (
        (
            c["step_number"],
            c["fine_tuned_model_checkpoint"],
            _loss(c["metrics"]["train_loss"]),
            _loss(c["metrics"]["valid_loss"]),
            size(c["bytes"]),
            moment(c["created_at"]),
        )
        for c in found
    )
    print_table(("STEP", "MODEL", "LOSS", "VALID", "SIZE", "CREATED"), rows)


def _loss(loss: float | None) -> str | None:
    return None if loss is None else f"{loss:.4f}"
