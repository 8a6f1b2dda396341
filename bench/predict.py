"""``python -m bench.predict``: a rank's memory as the planner predicts it, and as it is."""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import torch
from pydantic import TypeAdapter

from bench.finetuning.runs import torchrun
from bench.launch import ROOT, RunFailed
from bench.machine import this_machine
from bench.predicting.case import CASES, Case
from bench.predicting.rank import Taken
from bench.predicting.results import Results, Row, render
from bench.predicting.subjects import micro_batch, subject
from zero_core.planner.profile import ModelProfile
from zero_core.planner.step import resident_peak
from zero_core.training.profiling import profile

DIRECTORY = ROOT / "docs" / "benchmarks"
CPU = torch.device("cpu")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.predict", description=__doc__)
    parser.add_argument("--cases", nargs="+", type=int, metavar="NUMBER", help="of the list; default all")
    parser.add_argument("--output", type=Path, default=DIRECTORY)
    options = parser.parse_args()
    chosen = range(len(CASES)) if options.cases is None else options.cases
    rows, failures = [], {}
    for case in (CASES[number] for number in chosen):
        print(case.title, file=sys.stderr, flush=True)
        try:
            taken = measure(case)
        except RunFailed as failure:
            failures[case.title] = str(failure)
            continue
        fullest = max(taken, key=lambda rank: max(rank.peaks) - rank.imports)
        rows.append(Row(case, fullest.imports, fullest.imports + predict(case), max(fullest.peaks)))
    command = " ".join(
        ["python -m bench.predict", *(["--cases", *map(str, chosen)] if options.cases else [])]
    )
    results = Results(this_machine(), command, rows, failures)
    (options.output / "memory.json").write_bytes(TypeAdapter(Results).dump_json(results, indent=1) + b"\n")
    (options.output / "memory.md").write_text(render(results))


def measure(case: Case) -> list[Taken]:
    """Of each rank. Raises RunFailed."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "case.json"
        path.write_bytes(TypeAdapter(Case).dump_json(case))
        torchrun("bench.predicting.rank", path, case.ranks)
        answers = [path.with_name(f"rank-{rank}.json").read_text() for rank in range(case.ranks)]
    return [TypeAdapter(Taken).validate_python(json.loads(answer)) for answer in answers]


_recorded: dict[tuple[object, ...], ModelProfile] = {}
"""Profiles, by what they depend on."""


def predict(case: Case) -> int:
    """Resident bytes of a rank beyond its imports."""
    key = (case.architecture, case.lora, case.precision)
    if key not in _recorded:
        _recorded[key] = profile(
            case.title, subject(case)[0], case.train, case.precision, CPU, case.longest_recorded
        )
    recorded = _recorded[key]
    timeline = recorded.timeline(packed=case.packed, checkpointed=case.checkpointed)
    return resident_peak(recorded, case.zero, case.ranks, timeline, micro_batch(case).shape)


if __name__ == "__main__":
    main()
