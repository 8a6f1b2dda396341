"""Events of jobs as lines of text."""

from collections.abc import Iterator
from typing import Literal

from shardyard.cli.output import moment
from shardyard.client import Json, Shardyard

TEXT_LENGTH = 300
"""Characters of a prompt or an answer that are shown."""


def until_the_end(client: Shardyard, job_id: str, limit: int, follow: bool) -> Iterator[Json]:
    """The newest ``limit``, oldest first; then, when followed, all that come until the job has ended."""
    newest = list(client.jobs.events(job_id, limit))[::-1]
    yield from newest
    if follow:
        yield from client.jobs.follow_events(job_id, newest[-1]["id"] if newest else None)


def event_line(event: Json) -> str:
    level = "" if event["level"] == "info" else f"{event['level']}: "
    line = f"{moment(event['created_at'])}  {level}{event['message']}"
    return "\n".join([line, *sample_lines(event)]) if is_sample(event) else line


def is_sample(event: Json) -> bool:
    """What the model said to a prompt of the validation file."""
    return "prompt" in event["data"] and "answer" in event["data"]


def sample_lines(event: Json) -> list[str]:
    said = event["data"]
    lines = [
        f"  prompt    {shortened(said['prompt'], keep='end')}",
        f"  answer    {shortened(said['answer'])}",
    ]
    if said.get("reference"):
        lines.append(f"  expected  {shortened(said['reference'])}")
    return lines


def shortened(text: str, keep: Literal["start", "end"] = "start") -> str:
    """In one line. Of a prompt the end is kept, where its question is."""
    line = " ".join(text.split())
    if len(line) <= TEXT_LENGTH:
        return line
    return f"{line[: TEXT_LENGTH - 1]}…" if keep == "start" else f"…{line[1 - TEXT_LENGTH :]}"
