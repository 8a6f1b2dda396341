"""``shardyard files``."""

from pathlib import Path
from typing import Annotated

import typer

from shardyard.cli.output import AsJson, console, moment, print_json, print_table, size
from shardyard.client import Shardyard

app = typer.Typer(no_args_is_help=True)


@app.command()
def upload(
    path: Annotated[Path, typer.Argument(exists=True, dir_okay=False, readable=True)], as_json: AsJson = False
) -> None:
    """Upload a training file of JSON lines."""
    with Shardyard() as client:
        file = client.files.upload(path)
    if as_json:
        print_json(file)
        return
    console.print(f"{file['id']}  {size(file['bytes'])}", highlight=False, markup=False)
    if file["status"] == "error":
        console.print(f"It can't be trained on: {file['status_details']}", style="yellow", markup=False)


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
