"""Following a job: a bar with step, loss, speed and time left, and a line of memory for each rank.

Where the output is no terminal there is nothing to redraw, so each new step is a line of its own.
"""

from typing import Literal

from rich.console import Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from shardyard.cli.output import console, print_line, size
from shardyard.client import Json, Shardyard, Update

CATEGORIES = ("parameters", "gradients", "optimizer", "communication", "activations", "other")
"""Of a rank's memory, as the engine counts it."""

LIVE = ("parameters", "gradients", "optimizer", "activations")
"""Those that fit into a line under the bar."""


def watch_job(client: Shardyard, job_id: str, quiet: bool = False) -> Json:
    """Follow the job until it ends. Ctrl-C ends the watching only."""
    if quiet:
        return _to_the_end(client, job_id)
    display = JobDisplay()
    if not console.is_terminal:
        return _print_steps(client, job_id, display)
    with Live(display.render(), console=console, refresh_per_second=4) as live:
        for update in client.jobs.watch(job_id):
            display.take(update)
            live.update(display.render())
    return update.job


def _to_the_end(client: Shardyard, job_id: str) -> Json:
    for update in client.jobs.watch(job_id):
        job = update.job
    return job


def _print_steps(client: Shardyard, job_id: str, display: "JobDisplay") -> Json:
    told: tuple[str, str] | None = None
    for update in client.jobs.watch(job_id):
        display.take(update)
        now = (display.doing, display.position)
        if now != told:
            print_line(f"{display.doing:<13} {display.position}  {display.figures}".rstrip())
        told = now
    return update.job


class JobDisplay:
    """The newest of everything that a job has reported."""

    def __init__(self) -> None:
        self.doing = "queued"
        self._loss: float | None = None
        self._valid_loss: float | None = None
        self._memory: dict[int, Json] = {}
        self._position: Json = {"step": 0, "total_steps": None, "tokens_per_second": None, "eta": None}
        self._bar = Progress(
            TextColumn("{task.description:<13}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            console=console,
        )
        self._task = self._bar.add_task(self.doing, total=None, figures="")

    def take(self, update: Update) -> None:
        job = update.job
        for metric in update.metrics:
            self._loss = self._loss if metric["train_loss"] is None else metric["train_loss"]
            self._valid_loss = self._valid_loss if metric["valid_loss"] is None else metric["valid_loss"]
        for row in update.memory:
            self._memory[row["rank"]] = row
        self.doing = job["phase"] if job["status"] == "running" and job["phase"] else job["status"]
        self._position = job["progress"]
        self._bar.update(
            self._task,
            description=self.doing,
            completed=self._position["step"],
            total=self._position["total_steps"],
            figures=self.figures,
        )

    def render(self) -> Group:
        ranks = [
            Text(f"  rank {rank}: {memory_line(row)}", style="dim")
            for rank, row in sorted(self._memory.items())
        ]
        return Group(self._bar, *ranks)

    @property
    def position(self) -> str:
        return f"{self._position['step']}/{self._position['total_steps'] or '?'}"

    @property
    def figures(self) -> str:
        parts = []
        if self._loss is not None:
            parts.append(f"loss {self._loss:.4f}")
        if self._valid_loss is not None:
            parts.append(f"valid {self._valid_loss:.4f}")
        if self._position["tokens_per_second"]:
            parts.append(f"{self._position['tokens_per_second']:,.0f} tokens/s")
        if self._position["eta"] is not None:
            minutes, seconds = divmod(round(self._position["eta"]), 60)
            parts.append(f"{minutes}:{seconds:02d} left")
        return "  ".join(parts)


def memory_line(row: Json) -> str:
    """A rank's peak during its newest step."""
    parts = [f"{name} {size(held(row, name, 'peak'))}" for name in LIVE if name in row["memory"]]
    return ", ".join([*parts, f"resident {size(row['resident_peak'])}"])


def held(row: Json, category: str, when: Literal["current", "peak"]) -> int:
    """Bytes of one category that a rank held after a step, or at most during it, over all tiers."""
    return sum(row["memory"][category][when].values())
