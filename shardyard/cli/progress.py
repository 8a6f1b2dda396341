"""Following a job: a bar with step, loss, speed and time left, and a line of memory for each rank."""

from rich.console import Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.text import Text

from shardyard.cli.output import console, size
from shardyard.client import Json, Shardyard

SHOWN = ("parameters", "gradients", "optimizer", "communication", "activations")


def watch_job(client: Shardyard, job_id: str, quiet: bool = False) -> Json:
    """Follow the job until it ends; Ctrl-C stops the watching and leaves the job alone."""
    display = JobDisplay()
    job: Json = {}
    try:
        with Live(display.render(), console=console, refresh_per_second=4, disable=quiet) as live:
            for job in client.jobs.watch(job_id):
                display.update(job, client.jobs.telemetry(job_id, display.last_step - 1))
                live.update(display.render())
    except KeyboardInterrupt:
        if not quiet:
            console.print(f"The job goes on. `shardyard jobs watch {job_id}` shows it again.")
        raise
    return job


class JobDisplay:
    def __init__(self) -> None:
        self.last_step = -1
        self._loss: float | None = None
        self._valid_loss: float | None = None
        self._memory: dict[int, Json] = {}
        self._progress = Progress(
            TextColumn("{task.description:<13}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            console=console,
        )
        self._task: TaskID = self._progress.add_task("queued", total=None, figures="")

    def update(self, job: Json, telemetry: Json) -> None:
        for metric in telemetry["metrics"]:
            self.last_step = metric["step"]
            self._loss = self._loss if metric["train_loss"] is None else metric["train_loss"]
            self._valid_loss = self._valid_loss if metric["valid_loss"] is None else metric["valid_loss"]
        for row in telemetry["memory"]:
            self._memory[row["rank"]] = row
        running = job["status"] == "running" and job["phase"]
        progress = job["progress"]
        self._progress.update(
            self._task,
            description=job["phase"] if running else job["status"],
            completed=progress["step"],
            total=progress["total_steps"],
            figures=self._figures(progress),
        )

    def render(self) -> Group:
        lines = [Text(f"  rank {rank}: {_memory_line(row)}", style="dim") for rank, row in self._ranks()]
        return Group(self._progress, *lines)

    def _ranks(self) -> list[tuple[int, Json]]:
        return sorted(self._memory.items())

    def _figures(self, progress: Json) -> str:
        parts = []
        if self._loss is not None:
            parts.append(f"loss {self._loss:.4f}")
        if self._valid_loss is not None:
            parts.append(f"valid {self._valid_loss:.4f}")
        if progress["tokens_per_second"]:
            parts.append(f"{progress['tokens_per_second']:,.0f} tokens/s")
        if progress["eta"] is not None:
            minutes, seconds = divmod(round(progress["eta"]), 60)
            parts.append(f"{minutes}:{seconds:02d} left")
        return "  ".join(parts)


def _memory_line(row: Json) -> str:
    parts = [f"{name} {size(sum(row['memory'][name]['peak'].values()))}" for name in SHOWN]
    return ", ".join([*parts, f"resident {size(row['resident_peak'])}"])
