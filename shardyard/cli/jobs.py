"""``shardyard jobs``."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from shardyard.cli.files import require_usable
from shardyard.cli.output import (
    INTERRUPTED,
    AsJson,
    moment,
    print_fields,
    print_json,
    print_line,
    print_table,
)
from shardyard.cli.progress import watch_job
from shardyard.client import Json, Shardyard
from shardyard.errors import JobFailed

app = typer.Typer(no_args_is_help=True)

JobId = Annotated[str, typer.Argument(help="The job's id, ftjob-...")]
FileArgument = Annotated[str, typer.Argument(help="A file to upload, or the id of one that is uploaded.")]


@app.command()
def submit(
    model: Annotated[str, typer.Argument(help="A model of `shardyard models ls`.")],
    training_file: FileArgument,
    validation_file: Annotated[str | None, typer.Option(help="Likewise, to evaluate on.")] = None,
    epochs: Annotated[float | None, typer.Option(help="Passes over the training file.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Examples in a step, over all ranks.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Peak of the schedule.")] = None,
    gpus: Annotated[int, typer.Option(help="Ranks, each with a GPU or a CPU slot.")] = 1,
    stage: Annotated[int | None, typer.Option(help="ZeRO stage, 0 to 3.")] = None,
    precision: Annotated[str | None, typer.Option(help="fp32, bf16 or fp16.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Any training field, as KEY=VALUE.")] = None,
    suffix: Annotated[str | None, typer.Option(help="Becomes part of the model's name.")] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Stay and show the progress.")] = False,
    as_json: AsJson = False,
) -> None:
    """Submit a fine-tuning job."""
    training = {
        "num_train_epochs": epochs,
        "train_batch_size": batch_size,
        "learning_rate": learning_rate,
        "zero_stage": stage,
        "precision": precision,
    }
    chosen = {name: value for name, value in training.items() if value is not None} | _settings(set_ or [])
    with Shardyard() as client:
        fields: Json = {"training": chosen, "resources": {"gpus": gpus}}
        training_id = _file_id(client, training_file)
        if validation_file is not None:
            fields["validation_file"] = _file_id(client, validation_file)
        if suffix is not None:
            fields["suffix"] = suffix
        job = client.jobs.submit(model, training_id, **fields)
        if watch:
            if not as_json:
                print_line(job["id"])
            job = _follow(client, job["id"], as_json)
    _print_job(job, as_json)
    if watch or job["status"] == "failed":
        _require_success(job)


@app.command()
def ls(as_json: AsJson = False) -> None:
    """List the team's jobs, newest first."""
    with Shardyard() as client:
        jobs = list(client.jobs.list())
    if as_json:
        print_json(jobs)
        return
    rows = ((j["id"], j["model"], j["status"], _step(j), moment(j["created_at"])) for j in jobs)
    print_table(("ID", "MODEL", "STATUS", "STEP", "CREATED"), rows)


@app.command()
def show(job_id: JobId, as_json: AsJson = False) -> None:
    """Show one job."""
    with Shardyard() as client:
        job = client.jobs.show(job_id)
    _print_job(job, as_json)


@app.command()
def watch(job_id: JobId, as_json: AsJson = False) -> None:
    """Follow a job to its end; the exit code is 0 only if it succeeds. Ctrl-C leaves the job running."""
    with Shardyard() as client:
        job = _follow(client, job_id, as_json)
    _print_job(job, as_json)
    _require_success(job)


@app.command()
def logs(
    job_id: JobId,
    tail: Annotated[int, typer.Option(min=1, help="Lines from the end.")] = 200,
    as_json: AsJson = False,
) -> None:
    """Print what the newest attempt of a job printed."""
    with Shardyard() as client:
        text = client.jobs.logs(job_id, tail)
    if as_json:
        print_json(text.splitlines())
    else:
        sys.stdout.write(text)


@app.command()
def cancel(job_id: JobId, as_json: AsJson = False) -> None:
    """Cancel a job."""
    with Shardyard() as client:
        job = client.jobs.cancel(job_id)
    _print_job(job, as_json)


def _file_id(client: Shardyard, given: str) -> str:
    """Upload what is a path; leave alone what is an id."""
    path = Path(given)
    if not path.exists():
        if given.startswith("file-"):
            return given
        raise typer.BadParameter(f"{given} is neither a file here nor the id of an uploaded one (file-...)")
    if not path.is_file():
        raise typer.BadParameter(f"{given} is not a file")
    file = client.files.upload(path)
    require_usable(file)
    file_id: str = file["id"]
    return file_id


def _follow(client: Shardyard, job_id: str, as_json: bool) -> Json:
    try:
        return watch_job(client, job_id, quiet=as_json)
    except KeyboardInterrupt:
        print(
            f"Stopped watching; the job goes on. `shardyard jobs watch {job_id}` shows it again, "
            f"`shardyard jobs cancel {job_id}` ends it.",
            file=sys.stderr,
        )
        raise typer.Exit(INTERRUPTED) from None


def _settings(pairs: list[str]) -> dict[str, Any]:
    """``KEY=VALUE``, where the value is JSON if it can be read as such, else text."""
    settings = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise typer.BadParameter(f"--set {pair}: write KEY=VALUE")
        try:
            settings[key] = json.loads(value)
        except ValueError:
            settings[key] = value
    return settings


def _step(job: Json) -> str:
    progress = job["progress"]
    return f"{progress['step']}/{progress['total_steps'] or '?'}"


def _print_job(job: Json, as_json: bool) -> None:
    if as_json:
        print_json(job)
        return
    error = job["error"] or {}
    fields = [
        ("job", job["id"]),
        ("status", job["status"]),
        ("phase", job["phase"]),
        ("model", job["model"]),
        ("step", _step(job)),
        ("attempts", job["attempts"]),
        ("created", moment(job["created_at"])),
        ("finished", moment(job["finished_at"])),
        ("fine-tuned model", job["fine_tuned_model"]),
        ("reason", job["reason"]),
        ("error", error.get("message")),
        *(("warning", warning) for warning in job["warnings"]),
    ]
    print_fields(fields)


def _require_success(job: Json) -> None:
    if job["status"] != "succeeded":
        error = job["error"] or {}
        raise JobFailed(
            f"{job['id']} {job['status']}: {error.get('message') or job['reason'] or 'no reason given'}. "
            f"`shardyard jobs logs {job['id']}` has what it printed."
        )
