"""``python -m bench.zero``: step time and memory of every engine on CPU ranks, and the report of it.

Results of other cases that the output directory already holds stay in the report, so the whole grid can
be measured in parts. With ``--overhead`` the engine is measured on one rank beside the plain model instead.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from pydantic import TypeAdapter

from bench.engines import ENGINES
from bench.launch import RunFailed, run_ranks
from bench.machine import this_machine
from bench.models import SHAPES
from bench.report import DIRECTORY, write_report
from bench.results import Comparison, Results, Run
from bench.task import Case, Task

COMPARED = [name for name in ENGINES if name != "plain"]
OVERHEAD = ("plain", "shardyard-3")


def main(arguments: list[str] | None = None) -> None:
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        cases = list(_cases(options))
    except ValueError as error:
        parser.error(str(error))
    results, measured = Results.read(options.output / "zero.json"), Results()
    for case in cases:
        comparison = Comparison(case, _command(options, case), this_machine(), list(_runs(case, options)))
        if options.overhead:
            results, measured = results.with_overhead(comparison), measured.with_overhead(comparison)
        else:
            results, measured = results.with_comparison(comparison), measured.with_comparison(comparison)
        # After each case, so that stopping the next one loses nothing.
        write_report(results, options.output)
    if options.json:
        print(TypeAdapter(Results).dump_json(measured, indent=1).decode())
    else:
        print(options.output / "zero.md")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.zero", description="Measure the ZeRO engine.")
    add = parser.add_argument
    add("--models", nargs="+", choices=list(SHAPES), default=["base"])
    add("--precision", nargs="+", choices=["fp32", "bf16"], default=["fp32", "bf16"])
    add("--ranks", nargs="+", type=int, default=[2, 4])
    add("--engines", nargs="+", choices=COMPARED, default=COMPARED)
    add("--overhead", action="store_true", help="one rank, beside the plain model; no --ranks, no --engines")
    add("--repetitions", type=_positive, default=3, help="runs of each engine")
    add("--steps", type=int, default=8, help="steps of each run, the two of warm-up included")
    add("--seq", type=int, default=64, help="tokens of a sequence")
    add("--batch", type=int, default=1, help="sequences a rank")
    add("--timeout", type=float, default=900.0, help="seconds that a run may take")
    add("--output", type=Path, default=DIRECTORY, help="directory of zero.md, zero.json and zero.svg")
    add("--json", action="store_true", help="print the results that were measured")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError(f"{value} must be at least 1")
    return value


def _cases(options: argparse.Namespace) -> Iterator[Case]:
    for model in options.models:
        for precision in options.precision:
            for ranks in [1] if options.overhead else options.ranks:
                yield Case(model, precision, ranks, options.steps, options.seq, options.batch)


def _runs(case: Case, options: argparse.Namespace) -> Iterator[Run]:
    """Repetition by repetition, so that what a machine is busy with meets all engines alike."""
    for repetition in range(1, options.repetitions + 1):
        for engine in OVERHEAD if options.overhead else options.engines:
            print(f"{case.title}, {repetition}/{options.repetitions}: {engine}", file=sys.stderr)
            try:
                measurement = run_ranks(Task(case, engine), options.timeout)
            except RunFailed as failure:
                yield Run(engine, repetition, failure=str(failure))
            else:
                yield Run(engine, repetition, measurement=measurement)


def _command(options: argparse.Namespace, case: Case) -> str:
    """What measures this case again, every choice spelled out."""
    words = ["python -m bench.zero", f"--models {case.model}", f"--precision {case.precision}"]
    if options.overhead:
        words.append("--overhead")
    else:
        words += [f"--ranks {case.ranks}", f"--engines {' '.join(options.engines)}"]
    words += [f"--repetitions {options.repetitions}", f"--steps {case.steps}"]
    return " ".join([*words, f"--seq {case.sequence_length}", f"--batch {case.rows}"])


if __name__ == "__main__":
    main()
