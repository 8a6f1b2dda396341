"""``shardyard jobs``, but for ``submit``."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from shardyard.cli.events import event_line, until_the_end
from shardyard.cli.job_view import method_of, print_job, require_success, step_of
from shardyard.cli.output import AsJson, moment, print_json, print_line, print_table
from shardyard.cli.progress import follow_job
from shardyard.cli.results import results_rows
from shardyard.cli.submit import submit
from shardyard.client import Shardyard
from shardyard.errors import UnreadableFile

app = typer.Typer(no_args_is_help=True)
app.command()(submit)

JobId = Annotated[str, typer.Argument(help="The job's id, ftjob-...")]


@app.command()
def ls(as_json: AsJson = False) -> None:
    """List the team's jobs, newest first."""
    with Shardyard() as client:
        jobs = list(client.jobs.list())
    if as_json:
        print_json(jobs)
        return
    rows = (
        (j["id"], j["model"], method_of(j), j["status"], step_of(j), moment(j["created_at"])) for j in jobs
    )
    print_table(("ID", "MODEL", "METHOD", "STATUS", "STEP", "CREATED"), rows)


@app.command()
def show(job_id: JobId, as_json: AsJson = False) -> None:
    """Show one job."""
    with Shardyard() as client:
        job = client.jobs.show(job_id)
    print_job(job, as_json)


@app.command()
def watch(job_id: JobId, as_json: AsJson = False) -> None:
    """Follow a job to its end; the exit code is 0 only if it succeeds. Ctrl-C leaves the job running."""
    with Shardyard() as client:
        job = follow_job(client, job_id, as_json)
    print_job(job, as_json, known=True)
    require_success(job)


@app.command()
def events(
    job_id: JobId,
    limit: Annotated[int, typer.Option(min=1, help="Newest events to begin with.")] = 20,
    follow: Annotated[bool, typer.Option("--follow", help="Go on until the job has ended.")] = False,
    as_json: AsJson = False,
) -> None:
    """Print what a job has reported, newest last. With --json and --follow, all of it at the end."""
    with Shardyard() as client:
        shown = []
        for event in until_the_end(client, job_id, limit, follow):
            if as_json:
                shown.append(event)
            else:
                print_line(event_line(event))
    if as_json:
        print_json(shown)


@app.command()
def results(
    job_id: JobId,
    output: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Write the CSV here instead of printing it.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print the results of a job that succeeded: a CSV line of metrics for each step."""
    with Shardyard() as client:
        content = client.jobs.results(job_id)
    if output is None:
        text = content.decode()
        if as_json:
            print_json(results_rows(text))
        else:
            sys.stdout.write(text)
        return
    try:
        output.write_bytes(content)
    except OSError as error:
        raise UnreadableFile(f"{output} can't be written: {error.strerror}") from error
    if as_json:
        print_json({"path": str(output), "bytes": len(content)})
    else:
        print_line(str(output))


@app.command()
def logs(
    job_id: JobId,
    tail: Annotated[int, typer.Option(min=1, help="Lines from the end.")] = 200,
    attempt: Annotated[int | None, typer.Option(min=1, help="Not the newest attempt, but this one.")] = None,
    as_json: AsJson = False,
) -> None:
    """Print what an attempt of a job printed: its ranks, and the supervisor that started them."""
    with Shardyard() as client:
        text = client.jobs.logs(job_id, tail, attempt)
    if as_json:
        print_json(text.splitlines())
    else:
        sys.stdout.write(text)


@app.command()
def cancel(job_id: JobId, as_json: AsJson = False) -> None:
    """Cancel a job."""
    with Shardyard() as client:
        job = client.jobs.cancel(job_id)
    print_job(job, as_json)
