"""What the demo shows at its end."""

import shlex
from dataclasses import dataclass
from pathlib import Path

from rich.panel import Panel
from rich.text import Text

from shardyard.address import CLIENT_FILE
from shardyard.cli.output import console, print_fields, print_line, print_table, size
from shardyard.cli.progress import CATEGORIES, peak
from shardyard.client import Json


@dataclass(frozen=True)
class Outcome:
    job: Json
    loss_before: float
    loss_after: float
    memory: list[Json]
    """Of each rank, in the last step."""
    prompt: str
    expected: str
    answer_before: str
    answer_after: str
    checkpoint: Path
    export: Path


def report(outcome: Outcome, url: str, data_dir: Path) -> None:
    _heading("Validation loss")
    change = outcome.loss_after / outcome.loss_before - 1
    print_line(f"{outcome.loss_before:.4f} before, {outcome.loss_after:.4f} after ({change:+.1%})")
    _heading("A question that was not in the training data")
    print_line(outcome.prompt)
    for title, text in (
        ("before", outcome.answer_before),
        ("after", outcome.answer_after),
        ("the documentation", outcome.expected),
    ):
        console.print(Panel(Text(text), title=title, title_align="left"))
    _heading("Memory of each rank, at most during the last step")
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
    _open_the_api(url, data_dir)


def _heading(text: str) -> None:
    print_line("")
    print_line(text, style="bold")


def _memory_table(memory: list[Json]) -> None:
    ranks = sorted(memory, key=lambda row: int(row["rank"]))
    names = [name for name in CATEGORIES if all(name in row["memory"] for row in ranks)]
    rows = [(name, *(size(peak(row, name)) for row in ranks)) for name in names]
    rows.append(("resident", *(size(row["resident_peak"]) for row in ranks)))
    print_table(("", *(f"RANK {row['rank']}" for row in ranks)), rows)


def _open_the_api(url: str, data_dir: Path) -> None:
    """How to go on by hand. The key itself is not shown: terminals are logged."""
    program = f"import json; print(json.load(open({str(data_dir / CLIENT_FILE)!r}))['api_key'])"
    _heading("Open the API")
    print_line(f"shardyard up --data {shlex.quote(str(data_dir))}")
    print_line(f"KEY=$(python3 -c {shlex.quote(program)})")
    print_line(f'curl -H "Authorization: Bearer $KEY" {url}/v1/fine_tuning/jobs')
