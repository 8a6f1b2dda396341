"""``shardyard models``."""

from pathlib import Path
from typing import Annotated

import typer

from shardyard.cli.output import AsJson, moment, print_json, print_line, print_table
from shardyard.client import Shardyard

app = typer.Typer(no_args_is_help=True)


@app.command()
def ls(as_json: AsJson = False) -> None:
    """List base models and what jobs made of them, newest first. Jobs start from whole models."""
    with Shardyard() as client:
        models = list(client.models.list())
    if as_json:
        print_json(models)
        return
    rows = (
        (m["id"], m["kind"], m["base_model"], _count(m["parameters"]), m["path"], moment(m["created"]))
        for m in models
    )
    print_table(("ID", "KIND", "BASE", "PARAMETERS", "PATH", "CREATED"), rows)


@app.command()
def add(
    name: Annotated[str, typer.Argument(help="Name that jobs will give as their model.")],
    path: Annotated[Path, typer.Argument(help="A Hugging Face directory on the server.")],
    as_json: AsJson = False,
) -> None:
    """Register a base model for every team (needs an administrator's key)."""
    with Shardyard() as client:
        model = client.models.add(name, path.resolve())
    if as_json:
        print_json(model)
        return
    print_line(f"{model['id']}  {_count(model['parameters'])} parameters")


def _count(parameters: int | None) -> str:
    return "?" if parameters is None else f"{parameters:,}"
