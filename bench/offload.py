"""``python -m bench.offload``: training under a limit of memory, and the disk tier beside the disk itself.

187.7 M parameters in fp32 on one rank: 3.0 GB of parameters, gradients and optimizer state. fio must be
installed; it measures the disk in the same run.
"""

import argparse
import json
import shutil
import subprocess
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from pydantic import TypeAdapter

from bench.finetuning.runs import run_python
from bench.launch import ROOT, RunFailed
from bench.machine import Machine, this_machine
from bench.markdown import table
from bench.models import SHAPES
from bench.offloading.task import OffloadRun, OffloadTask

DIRECTORY = ROOT / "docs" / "benchmarks"
LIMIT = 2 << 30
WARM_UP = 1
"""Steps of a run that don't count: torch makes the optimizer's state in the first."""

OF_THE_DISK = 0.7
"""Bytes moved in an update over its time, of what fio moves."""
HOST_STEP = 1.1
"""Of a step without."""
MOVED_BYTES = 2 * 12
"""An element's master weight and two moments, read and written."""

HOW = f"""\
{SHAPES["base"].elements / 1e6:.1f} M parameters in fp32 on one rank with two threads, at stage 3; rows of
2 x 128 tokens. Runs take turns; the first step of each does not count; medians."""

PEERS = """\
`shardyard` keeps optimizer and parameters on the disk. `plain` is a loop with torch's fused AdamW.
`deepspeed` is its stage 3 with optimizer and parameters on NVMe."""


@dataclass(frozen=True)
class Offloading:
    machine: Machine
    limited: dict[str, OffloadRun | str]
    """By engine: what it did under the limit, or what ended it."""
    free: dict[str, list[OffloadRun]]
    """By tier, without a limit, runs in turn."""
    disk_bytes_per_second: list[float]
    """Read and written at once, by fio, between the runs."""

    @property
    def moved_bytes_per_second(self) -> float:
        moved = MOVED_BYTES * SHAPES["base"].elements
        return moved / _median(self.free["disk"], "update_seconds")

    @property
    def host_ratio(self) -> float:
        return _median(self.free["host"], "seconds") / _median(self.free["device"], "seconds")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scratch", type=Path, help="a directory on the disk that is measured")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--repetitions", type=int, default=2)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as directory:
        offloading = measure(Path(directory), arguments.steps, arguments.repetitions)
    (DIRECTORY / "offload.json").write_bytes(TypeAdapter(Offloading).dump_json(offloading, indent=1) + b"\n")
    (DIRECTORY / "offload.md").write_text(render(offloading))


def measure(scratch: Path, steps: int, repetitions: int) -> Offloading:
    task = OffloadTask("shardyard", "base", "disk", "disk", steps, 2, 128, None, scratch)
    limited: dict[str, OffloadRun | str] = {}
    for engine in ("shardyard", "plain", "deepspeed"):
        try:
            limited[engine] = _run(replace(task, engine=engine, limit=LIMIT))
        except RunFailed as failure:
            limited[engine] = str(failure)
    free: dict[str, list[OffloadRun]] = {"device": [], "host": [], "disk": []}
    disk = []
    for _ in range(repetitions):
        for tier, runs in free.items():
            parameters = "disk" if tier == "disk" else "device"
            runs.append(_run(replace(task, optimizer=tier, parameters=parameters)))  # type: ignore[arg-type]
        disk.append(_disk_bytes_per_second(scratch))
    return Offloading(this_machine(), limited, free, disk)


def _run(task: OffloadTask) -> OffloadRun:
    told, answer = task.scratch / "task.json", task.scratch / "answer.json"
    told.write_bytes(TypeAdapter(OffloadTask).dump_json(task))
    run_python(["-m", "bench.offloading.rank", str(told), str(answer)], threads=2)
    return TypeAdapter(OffloadRun).validate_json(answer.read_bytes())


def _disk_bytes_per_second(scratch: Path) -> float:
    """Half read, half written, past the page cache, as many at once as the disk takes."""
    if shutil.which("fio") is None:
        raise SystemExit("fio is not installed: it measures the disk that the tier is held against")
    options = {
        "name": "disk",
        "filename": str(scratch / "fio.data"),
        "size": "1g",
        "bs": "1m",
        "rw": "rw",
        "direct": "1",
        "ioengine": "libaio",
        "iodepth": "16",
        "time_based": "1",
        "runtime": "10",
        "output-format": "json",
    }
    command = ["fio", *(f"--{name}={value}" for name, value in options.items())]
    (job,) = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)["jobs"]
    (scratch / "fio.data").unlink()
    return float(job["read"]["bw_bytes"] + job["write"]["bw_bytes"])


def render(offloading: Offloading) -> str:
    disk = median(offloading.disk_bytes_per_second)
    share, host = offloading.moved_bytes_per_second / disk, offloading.host_ratio
    ours = offloading.limited["shardyard"]
    goals = [
        ("3.0 GB of states train under 2 GiB", "yes" if isinstance(ours, OffloadRun) else "no", "yes"),
        ("update on the disk tier, of the disk's bandwidth", f"{share:.2f}", f"at least {OF_THE_DISK}"),
        ("step with the optimizer on the host, of one without", f"{host:.2f}", f"at most {HOST_STEP}"),
    ]
    tiers = [
        (tier, *(f"{_median(runs, of):.2f}" for of in ("seconds", "update_seconds")), f"{_peak(runs):.0f}")
        for tier, runs in offloading.free.items()
    ]
    limited = [(name, _told(run)) for name, run in offloading.limited.items()]
    moved = offloading.moved_bytes_per_second
    parts = [
        "# Offload",
        HOW,
        "## Goals",
        table(("goal", "measured", "limit"), goals),
        f"## Under a limit of {LIMIT / 2**30:g} GiB of data (RLIMIT_DATA), the libraries' included",
        table(("engine", "result"), limited),
        PEERS,
        "## Tiers without a limit",
        table(("tier", "step, s", "of it the update, s", "peak, MB"), tiers),
        f"The update moves {MOVED_BYTES} bytes an element, {moved / 1e9:.2f} GB/s; fio moves "
        f"{disk / 1e9:.2f}, half of it read and half written. On the CPU the host is the device.",
        f"{offloading.machine.title}. Measured with `python -m bench.offload`.",
    ]
    return "\n\n".join(parts) + "\n"


def _told(run: OffloadRun | str) -> str:
    if isinstance(run, str):
        return f"failed: {run[:100]}"
    peak = f"resident peak {run.peak_bytes / 1e6:.0f} MB"
    return f"{len(run.losses)} steps, loss {run.losses[0]:.2f} to {run.losses[-1]:.2f}, {peak}"


def _median(runs: list[OffloadRun], of: str) -> float:
    return median(seconds for run in runs for seconds in getattr(run, of)[WARM_UP:])


def _peak(runs: list[OffloadRun]) -> float:
    return median(run.peak_bytes for run in runs) / 1e6


if __name__ == "__main__":
    main()
