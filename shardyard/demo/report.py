"""What the demo shows at its end."""

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from rich.panel import Panel
from rich.text import Text

from shardyard.address import CLIENT_FILE
from shardyard.cli.output import console, print_fields, print_line, print_table, size
from shardyard.cli.progress import CATEGORIES, held
from shardyard.client import Json


@dataclass(frozen=True)
class Question:
    """One of the validation file, and what the model answered."""

    question: str
    expected: str
    before: str
    after: str


@dataclass(frozen=True)
class Outcome:
    job: Json
    loss_before: float
    loss_after: float
    memory: list[Json]
    """Of each rank, in the last step."""
    questions: list[Question]
    again: str
    """The answer to the first one of the exported model, as transformers loads it."""
    checkpoint: Path
    export: Path


def report(outcome: Outcome) -> None:
    _heading("Validation loss")
    change = outcome.loss_after / outcome.loss_before - 1
    print_line(f"{outcome.loss_before:.4f} before, {outcome.loss_after:.4f} after ({change:+.1%})")
    _heading("Questions that were not in the training data")
    for question in outcome.questions:
        print_line(question.question)
        for title, text in (
            ("before", question.before),
            ("after", question.after),
            ("the documentation", question.expected),
        ):
            console.print(Panel(Text(text), title=title, title_align="left"))
    print_line("The exported model, loaded with transformers, answers the first of them:")
    console.print(Panel(Text(outcome.again)))
    _heading("Memory of each rank in the last step: after it, and at most during it")
    _memory_table(outcome.memory)
    formula = (outcome.job["plan"] or {}).get("model_state_bytes")
    if formula is not None:
        parts = ", ".join(f"{category} {size(nbytes)}" for category, nbytes in sorted(formula.items()))
        print_line(f"By ZeRO's formula, between steps: {parts}", style="dim")
    _heading("Where things are")
    print_fields(
        [
            ("job", outcome.job["id"]),
            ("model", outcome.job["fine_tuned_model"]),
            ("exported", outcome.export),
            ("checkpoint", outcome.checkpoint),
        ]
    )


def _heading(text: str) -> None:
    print_line("")
    print_line(text, style="bold")


def _memory_table(memory: list[Json]) -> None:
    ranks = sorted(memory, key=lambda row: int(row["rank"]))
    columns = [title for row in ranks for title in (f"RANK {row['rank']}", "AT MOST")]
    categories = [name for name in CATEGORIES if all(name in row["memory"] for row in ranks)]
    rows = [
        (name, *(size(held(row, name, when)) for row in ranks for when in ("current", "peak")))
        for name in categories
    ]
    rows.append(("resident", *(size(row[name]) for row in ranks for name in ("resident", "resident_peak"))))
    print_table(("", *columns), rows)


def show_the_way(url: str, data_dir: Path) -> None:
    """How to go on by hand. The key itself is not shown: terminals are logged."""
    command = Path(sys.executable).with_name("shardyard")
    port = url.rpartition(":")[2]
    client_file = shlex.quote(str(data_dir / CLIENT_FILE))
    program = "import json, sys; print(json.load(open(sys.argv[1]))['api_key'])"
    _heading("Open the API (the first line only if the service does not run)")
    print_line(f"{shlex.quote(str(command))} up --data {shlex.quote(str(data_dir))} --port {port} &")
    print_line(f'KEY=$(python3 -c "{program}" {client_file})')
    print_line(f'curl -H "Authorization: Bearer $KEY" {url}/v1/fine_tuning/jobs')
