"""Following a job: a bar with step, loss, speed and time left, and a line of memory for each rank.

Above it goes what comes once: samples, and warnings on stderr. Where the output is no terminal there is
nothing to redraw, so each new step is a line of its own.
"""

import sys
from typing import Literal

import typer
from rich.console import Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from shardyard.cli.events import is_sample, sample_lines
from shardyard.cli.job_view import print_warnings
from shardyard.cli.output import INTERRUPTED, console, print_line, size
from shardyard.client import Json, Shardyard, Update

CATEGORIES = ("parameters", "gradients", "optimizer", "communication", "idle", "activations", "other")
"""Of a rank's memory, as the engine counts it."""

LIVE = ("parameters", "gradients", "optimizer", "activations")
"""Those that fit into a line under the bar."""


MARGIN = "rewards/margins"
"""DPO: how much further the chosen answers have moved than the rejected ones."""

BEFORE_STEPS = ("preparing", "referencing")
"""Phases before the first step, which count lines and not steps."""


def follow_job(client: Shardyard, job_id: str, as_json: bool) -> Json:
    """``watch_job`` for a command: Ctrl-C leaves it, and says how to come back."""
    try:
        return watch_job(client, job_id, quiet=as_json)
    except KeyboardInterrupt:
        print(
            f"Stopped watching; the job goes on. `shardyard jobs watch {job_id}` shows it again, "
            f"`shardyard jobs cancel {job_id}` ends it.",
            file=sys.stderr,
        )
        raise typer.Exit(INTERRUPTED) from None


def watch_job(client: Shardyard, job_id: str, quiet: bool = False) -> Json:
    """Follow the job until it ends. Ctrl-C ends the watching only."""
    if quiet:
        return _to_the_end(client, job_id)
    display = JobDisplay()
    if not console.is_terminal:
        return _print_steps(client, job_id, display)
    # While it is live, what is printed, on stderr too, goes above what is redrawn.
    with Live(display.render(), console=console, refresh_per_second=4) as live:
        for update in client.jobs.watch(job_id):
            display.take(update)
            display.tell(update)
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
        display.tell(update)
    return update.job


class JobDisplay:
    """The newest of everything that a job has reported."""

    def __init__(self) -> None:
        self.doing = "queued"
        self._loss: float | None = None
        self._valid_loss: float | None = None
        self._margin: float | None = None
        self._warnings = 0
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
        for event in update.events:
            self._margin = event["data"].get(MARGIN, self._margin)
        at_work = job["status"] == "running" or job["phase"] in BEFORE_STEPS
        self.doing = job["phase"] if at_work and job["phase"] else job["status"]
        self._position = job["progress"]
        self._bar.update(
            self._task,
            description=self.doing,
            completed=self._counted[0],
            total=self._counted[1],
            figures=self.figures,
        )

    def tell(self, update: Update) -> None:
        """Print what comes once: warnings that are new, and samples."""
        warnings = update.job["warnings"]
        print_warnings(warnings[self._warnings :])
        self._warnings = len(warnings)
        for event in filter(is_sample, update.events):
            step = event["data"].get("step")
            for line in [f"sample at step {step}", *sample_lines(event)]:
                print_line(line)

    def render(self) -> Group:
        ranks = [
            Text(f"  rank {rank}: {memory_line(row)}", style="dim")
            for rank, row in sorted(self._memory.items())
        ]
        return Group(self._bar, *ranks)

    @property
    def position(self) -> str:
        done, total = self._counted
        param = (self._prepared or {}).get("param")
        return " ".join([*([param] if param else []), f"{done}/{total or '?'}"])

    @property
    def _prepared(self) -> Json | None:
        """The count of lines, in the phases that have one."""
        prepared: Json | None = self._position.get("prepared")
        return prepared if self.doing in BEFORE_STEPS else None

    @property
    def _counted(self) -> tuple[int, int | None]:
        prepared = self._prepared
        if prepared is not None:
            return prepared["done"], prepared["total"]
        return self._position["step"], self._position["total_steps"]

    @property
    def figures(self) -> str:
        parts = []
        if self._loss is not None:
            parts.append(f"loss {self._loss:.4f}")
        if self._valid_loss is not None:
            parts.append(f"valid {self._valid_loss:.4f}")
        if self._margin is not None:
            parts.append(f"margin {self._margin:+.4f}")
        if self._position["tokens_per_second"]:
            parts.append(f"{self._position['tokens_per_second']:,.0f} tokens/s")
        if self._position["eta"] is not None:
            minutes, seconds = divmod(round(self._position["eta"]), 60)
            parts.append(f"{minutes}:{seconds:02d} left")
        return "  ".join(parts)


def memory_line(row: Json) -> str:
    """A rank's peak during its newest step."""
    parts = [f"{where} {size(held)}" for where, held in peaks(row) if where in LIVE or held]
    return ", ".join([*parts, f"resident {size(row['resident_peak'])}"])


def peaks(row: Json) -> list[tuple[str, int]]:
    """Bytes that a rank held at most during a step, by category, what lies off the device apart."""
    return [
        (name if tier == "device" else f"{name} on {tier}", row["memory"][name]["peak"][tier])
        for name in LIVE
        if name in row["memory"]
        for tier in sorted(row["memory"][name]["peak"])
    ]


def held(row: Json, category: str, when: Literal["current", "peak"]) -> int:
    """Bytes of one category that a rank held in memory after a step, or at most during it."""
    tiers: Json = row["memory"][category][when]
    return sum(nbytes for tier, nbytes in tiers.items() if tier != "disk")
