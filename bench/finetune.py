"""``python -m bench.finetune``: a fine-tuning by this project and by TRL, in turns."""

import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import get_args

from bench.finetuning.material import make_material
from bench.finetuning.report import Results, Row, write
from bench.finetuning.runs import run
from bench.finetuning.task import ENGINES, Case, Engine, Measured
from bench.launch import ROOT, RunFailed
from bench.machine import this_machine

DIRECTORY = ROOT / "docs" / "benchmarks"


def cases(steps: int) -> dict[str, Case]:
    full = Case("full", lora=False, learning_rate=5e-5, batch_size=8, max_length=192, steps=steps)
    return {
        "full": full,
        "lora": replace(full, name="lora", lora=True, learning_rate=5e-4),
        "long": Case(
            "long", lora=False, learning_rate=5e-5, batch_size=2, max_length=4096, steps=3, long_texts=True
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.finetune", description=__doc__)
    parser.add_argument("--cases", nargs="+", default=["full", "lora", "long"], choices=cases(1))
    parser.add_argument("--engines", nargs="+", default=ENGINES, choices=get_args(Engine))
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--steps", type=int, default=28, help="of the cases with conversations")
    parser.add_argument("--data", type=Path, help="directory of the model and files; kept, so made once")
    parser.add_argument("--output", type=Path, default=DIRECTORY)
    options = parser.parse_args()
    for case in (cases(options.steps)[name] for name in options.cases):
        command = " ".join(
            [
                f"python -m bench.finetune --cases {case.name} --engines",
                *options.engines,
                f"--repetitions {options.repetitions} --steps {options.steps}",
            ]
        )
        with tempfile.TemporaryDirectory() as scratch:
            rows = measure(case, options, options.data or Path(scratch) / "data", Path(scratch))
        write(Results(case, this_machine(), command, rows), options.output)


def measure(case: Case, options: argparse.Namespace, data: Path, scratch: Path) -> list[Row]:
    material = make_material(data, case)
    entrants = [
        (engine, checkpointing)
        for engine in options.engines
        for checkpointing in ((False,) if engine == "shardyard" and not case.long_texts else (False, True))
    ]
    measured: dict[tuple[Engine, bool], list[Measured]] = {entrant: [] for entrant in entrants}
    failures: dict[tuple[Engine, bool], str] = {}
    for repetition in range(1, options.repetitions + 1):
        for engine, checkpointing in entrants:
            if (engine, checkpointing) in failures:
                continue
            progress = f"{case.name}, {repetition}/{options.repetitions}: {engine} {checkpointing}"
            print(progress, file=sys.stderr)
            try:
                found = run(material, case, engine, checkpointing, scratch / "run")
                measured[engine, checkpointing].append(found)
            except RunFailed as failure:
                failures[engine, checkpointing] = str(failure)
    return [Row(*entrant, measured[entrant], failures.get(entrant)) for entrant in entrants]


if __name__ == "__main__":
    main()
