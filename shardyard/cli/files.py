"""``shardyard files``."""

import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from shardyard.cli.output import AsJson, moment, print_fields, print_json, print_line, print_table, size
from shardyard.client import Json, Shardyard
from shardyard.errors import PreviewFailed, Unconvertible, UnreadableFile, UnusableFile
from zero_core.data import convert as conversion

app = typer.Typer(no_args_is_help=True)

LocalFile = Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="A file of JSON lines.")]


@app.command()
def upload(path: LocalFile, as_json: AsJson = False) -> None:
    """Upload a training file of JSON lines."""
    with Shardyard() as client:
        file = client.files.upload(path)
    if as_json:
        print_json(file)
    else:
        print_line(f"{file['id']}  {size(file['bytes'])}")
        _print_warnings(file["warnings"])
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


@app.command()
def show(
    file_id: Annotated[str, typer.Argument(help="The file's id, file-...")], as_json: AsJson = False
) -> None:
    """Show one file, with what is wrong with it or not used of it."""
    with Shardyard() as client:
        file = client.files.show(file_id)
    if as_json:
        print_json(file)
        return
    fields = [
        ("file", file["id"]),
        ("name", file["filename"]),
        ("purpose", file["purpose"]),
        ("size", size(file["bytes"])),
        ("format", file["format"]),
        ("examples", file["examples"]),
        ("created", moment(file["created_at"])),
        ("status", file["status"]),
        ("error", file["status_details"]),
        *(("warning", warning) for warning in file["warnings"]),
    ]
    print_fields(fields)


@app.command()
def rm(
    file_ids: Annotated[list[str], typer.Argument(metavar="ID...", help="Ids of files, file-...")],
    as_json: AsJson = False,
) -> None:
    """Delete files from the server; the first that can't be deleted ends it."""
    deleted = []
    with Shardyard() as client:
        try:
            for file_id in file_ids:
                deleted.append(client.files.delete(file_id))
                if not as_json:
                    print_line(f"{file_id} is deleted")
        finally:
            if as_json and deleted:
                print_json(deleted)


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="The file to convert.")],
    target: Annotated[
        Path | None, typer.Argument(dir_okay=False, help="To be written; beside SOURCE if it is left out.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace TARGET if it exists.")] = False,
    as_json: AsJson = False,
) -> None:
    """Make a training file of another form of file.

    Takes ShareGPT, Alpaca and TRL's formats; JSON arrays, JSON over several lines and CSV; gzip, zip,
    bzip2 and xz; UTF-16 and UTF-32. All of it is converted, or nothing is written.
    """
    target = target or conversion.default_target(source)
    try:
        done = conversion.convert(source, target, overwrite=force)
    except conversion.Unconvertible as error:
        raise Unconvertible(f"{error}. Nothing was written") from error
    except FileExistsError as error:
        raise Unconvertible(f"{error}; give another target, or --force to replace it") from error
    except OSError as error:
        raise UnreadableFile(f"{source} can't be converted to {target}: {error.strerror or error}") from error
    if as_json:
        print_json({"path": str(target), **asdict(done)})
        return
    was = f", was {', '.join(done.was)}" if done.was else ""
    print_line(f"{target}  {done.format}, {done.records:,} examples{was}")
    _print_warnings(done.warnings)


@app.command()
def preview(
    path: LocalFile,
    model: Annotated[
        str, typer.Option(help="A Hugging Face directory here, or a model of `shardyard models ls`.")
    ],
    lines: Annotated[int, typer.Option(min=1, help="Examples to show.")] = 3,
    chat_template: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Instead of the model's own.")
    ] = None,
    chat_template_kwargs: Annotated[str | None, typer.Option(help="For the template, as JSON.")] = None,
    train_on: Annotated[str | None, typer.Option(help="all answers, or the last.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show the text that a model is given of each example, with what is learnt marked.

    With --json, a JSON object for each example.
    """
    directory = Path(model) if Path(model).is_dir() else _registered(model)
    settings = {
        "--lines": lines,
        "--chat-template": chat_template and chat_template.resolve(),
        "--chat-template-kwargs": chat_template_kwargs,
        "--train-on": train_on,
    }
    given = [f"{name}={value}" for name, value in settings.items() if value is not None]
    # In a process of its own: it needs transformers. Its output goes where ours does, colours included.
    command = [sys.executable, "-m", "zero_core.data.preview", str(path.resolve())]
    command += ["--model", str(directory.resolve()), *given, *(["--json"] if as_json else [])]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"it exited with {done.returncode}"]
        reason = said[-1].removeprefix("error: ").removeprefix("training_file: ")
        raise PreviewFailed(f"{path} can't be shown: {reason}")


def require_usable(file: Json) -> None:
    """The server keeps a file with wrong lines, and says which; no job can train on it."""
    if file["status"] == "error":
        raise UnusableFile(
            f"{file['filename']} ({file['id']}) can't be trained on: {file['status_details']}. "
            "Correct it and upload it again"
        )


def _registered(model: str) -> Path:
    """Where a model of the server lies, if that is this machine."""
    with Shardyard() as client:
        found = next((m for m in client.models.list() if m["id"] == model), None)
    if found is None:
        raise PreviewFailed(f"{model} is neither a directory here nor a model of `shardyard models ls`")
    directory = Path(found["path"])
    if not directory.is_dir():
        raise PreviewFailed(f"{model} lies in {directory} on the server; give a directory of this machine")
    return directory


def _print_warnings(warnings: list[str] | tuple[str, ...]) -> None:
    for warning in warnings:
        print_line(f"warning: {warning}")
