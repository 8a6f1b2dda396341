"""``python -m bench.gpu``: tokens a second and peak memory in bf16 on the GPUs present.

Plain torch runs on one GPU, everything else on all. Without CUDA the report says so and claims nothing.
"""

import argparse
import sys
from pathlib import Path
from statistics import median

import torch

from bench.engines import ENGINES
from bench.launch import RunFailed, run_ranks
from bench.machine import this_machine
from bench.markdown import table
from bench.models import SHAPES
from bench.report import DIRECTORY
from bench.task import Case, Measurement, Task

MODELS = ("1.5B", "7B")
SHARDED = ("fsdp2", "deepspeed-fused-3", "shardyard-3")
STEPS = 12
SEQUENCE_LENGTH = 2048
TIMEOUT_SECONDS = 1800.0

TITLE = "# The ZeRO engine on GPUs"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description="Measure on the GPUs present.")
    parser.add_argument("--output", type=Path, default=DIRECTORY, help="directory of gpu.md")
    directory: Path = parser.parse_args().output
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "gpu.md"
    path.write_text(measured_report() if torch.cuda.is_available() else empty_report())
    print(path)


def empty_report() -> str:
    return (
        f"{TITLE}\n\n"
        "No GPU was at hand when this was written: nothing has been measured on one, and nothing is claimed "
        "about one.\n\nWhere there are GPUs, this measures them and replaces this page:\n\n"
        "```\npython -m bench.gpu\n```\n"
    )


def measured_report() -> str:
    count = torch.cuda.device_count()
    names = sorted({torch.cuda.get_device_name(index) for index in range(count)})
    how = (
        f"`python -m bench.gpu`, {count} x {', '.join(names)}; {this_machine().title}. bf16, AdamW, "
        f"1 x {SEQUENCE_LENGTH} tokens a GPU, {STEPS} steps, median step without warm-up. Peak memory is "
        "the highest of any GPU, as torch's allocator saw it."
    )
    parts = [TITLE, how]
    for model in MODELS:
        rows = [_row(model, engine, 1 if engine == "plain" else count) for engine in ("plain", *SHARDED)]
        head = ("engine", "GPUs", "tokens/s", "tokens/s a GPU", "peak memory, GiB")
        parts += [f"## {model}: {SHAPES[model].elements / 1e9:.2f} B parameters", table(head, rows)]
    return "\n\n".join(parts) + "\n"


def _row(model: str, engine: str, ranks: int) -> list[str]:
    print(f"{model}: {engine}", file=sys.stderr)
    title = ENGINES[engine].title
    case = Case(model, "bf16", ranks, STEPS, SEQUENCE_LENGTH, rows=1)
    try:
        measurement = run_ranks(Task(case, engine, device="cuda"), TIMEOUT_SECONDS)
    except RunFailed as failure:
        return [title, str(ranks), f"failed: {failure}", "—", "—"]
    rate = tokens_per_second(case, measurement)
    peak = measurement.peak_growth / 2**30
    return [title, str(ranks), f"{rate:,.0f}", f"{rate / ranks:,.0f}", f"{peak:.1f}"]


def tokens_per_second(case: Case, measurement: Measurement) -> float:
    """Of all ranks together."""
    return case.ranks * case.rows * case.sequence_length / median(measurement.step_seconds)


if __name__ == "__main__":
    main()
