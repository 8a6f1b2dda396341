"""The ``shardyard`` command with all its parts."""

import sys

import typer

from shardyard.cli import checkpoints, files, jobs, models
from shardyard.cli.demo import demo
from shardyard.cli.output import EXIT_CODES, fail
from shardyard.cli.up import up
from shardyard.errors import ShardyardError

app = typer.Typer(
    help="Fine-tuning on your own GPUs, in OpenAI's protocol.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(up)
app.command()(demo)
app.add_typer(files.app, name="files", help="Upload, convert, preview and list training files.")
app.add_typer(jobs.app, name="jobs", help="Submit, watch and cancel jobs.")
app.add_typer(
    checkpoints.app, name="checkpoints", help="List what jobs have saved; a next job can start there."
)
app.add_typer(models.app, name="models", help="List models and register base models.")


def run() -> None:
    """Ends the process with one of the exit codes."""
    try:
        app()
    except ShardyardError as error:
        sys.exit(fail(error))
