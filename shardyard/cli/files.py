"""``shardyard files``."""

from pathlib import Path
from typing import Annotated

import typer

from shardyard.cli.output import AsJson, moment, print_json, print_line, print_table, size
from shardyard.client import Json, Shardyard
from shardyard.errors import UnusableFile

app = typer.Typer(no_args_is_help=True)


@app.command()
def upload(
    path: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="A file of JSON lines.")],
    as_json: AsJson = False,
) -> None:
    """Upload a training file of JSON lines."""
    with Shardyard() as client:
        file = client.files.upload(path)
    if as_json:
        print_json(file)
    else:
        print_line(f"{file['id']}  {size(file['bytes'])}")
    require_usable(file)


@app.command()
def ls(as_json: AsJson = False) -> None:
    """List the team's files, newest first."""
    with Shardyard() as client:
        files = list(client.files.list())
    if as_json:
        print_json(files)
        return
    rows = (
        (f["id"], f["filename"], f["purpose"], size(f["bytes"]), f["status"], moment(f["created_at"]))
        for f in files
    )
    print_table(("ID", "NAME", "PURPOSE", "SIZE", "STATUS", "CREATED"), rows)


def require_usable(file: Json) -> None:
    """The server keeps a file with wrong lines, and says which; no job can train on it."""
    if file["status"] == "error":
        raise UnusableFile(
            f"{file['filename']} ({file['id']}) can't be trained on: {file['status_details']}. "
            "Correct it and upload it again"
        )
