"""Runs of each engine in processes of their own, and what they measured."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from bench.finetuning.material import Material, train_config, write_for_trl
from bench.finetuning.task import RANKS, WARM_UP, Case, Engine, Measured, Task
from bench.launch import ROOT, RunFailed, last_word
from zero_core.config.train import TrainConfig

TIMEOUT_SECONDS = 3600


def run(material: Material, case: Case, engine: Engine, checkpointing: bool, directory: Path) -> Measured:
    """Raises RunFailed with what the ranks printed last."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    if engine == "shardyard":
        return _ours(material, case, checkpointing, directory)
    return _trl(material, case, engine, checkpointing, directory)


def _ours(material: Material, case: Case, checkpointing: bool, directory: Path) -> Measured:
    attempt = write_run(
        material, replace(train_config(case), gradient_checkpointing=checkpointing), directory
    )
    torchrun("zero_core.train", attempt)
    events = lines_of(attempt / "events.jsonl")
    metrics = [event for event in events if event["kind"] == "metrics"]
    telemetry = [lines_of(attempt / f"rank-{rank}.jsonl") for rank in range(RANKS)]
    # From report to report, so that reporting counts.
    times = [event["time"] for event in metrics]
    return Measured(
        seconds=[after - before for before, after in pairwise(times)][WARM_UP - 1 :],
        tokens=[event["tokens"] for event in metrics][WARM_UP:],
        peak_bytes=max(line["resident_peak"] for lines in telemetry for line in lines),
        imports_bytes=resident_after_import("zero_core.training.train"),
        losses=[event["train_loss"] for event in metrics],
        valid_loss=_valid_loss(material, case, directory),
    )


def write_run(material: Material, train: TrainConfig, directory: Path) -> Path:
    """The directory of an attempt of this project's, to be run."""
    attempt = directory / "a1"
    attempt.mkdir()
    run = {
        "job_id": "bench",
        "epoch": 1,
        "model_path": str(material.model),
        "training_file": str(material.training_file),
        "validation_file": str(material.validation_file),
        "train": asdict(train),
        "min_examples": 1,
        "resume": [],
        "export_dir": str(directory / "result"),
        "hang_seconds": TIMEOUT_SECONDS,
        "cache_dir": str(material.cache),
    }
    (attempt / "run.json").write_text(json.dumps(run))
    return attempt


def _trl(material: Material, case: Case, engine: Engine, checkpointing: bool, directory: Path) -> Measured:
    examples = directory / "examples.jsonl"
    write_for_trl(material, case, examples)
    task = Task(case, engine, checkpointing, material.model, examples, directory)
    path = directory / "task.json"
    path.write_bytes(TypeAdapter(Task).dump_json(task))
    torchrun("bench.finetuning.trl_rank", path)
    ranks = [json.loads((directory / f"rank-{rank}.json").read_text()) for rank in range(RANKS)]
    ends = ranks[0]["ends"]
    lengths = [len(ids) for ids, _ in material.in_order(case)]
    size = case.batch_size
    return Measured(
        seconds=[after - before for before, after in pairwise(ends)][WARM_UP:],
        tokens=[sum(lengths[first : first + size]) for first in range(0, len(lengths), size)][WARM_UP:],
        peak_bytes=max(rank["peak_bytes"] for rank in ranks),
        imports_bytes=min(rank["imports_bytes"] for rank in ranks),
        losses=ranks[0]["losses"],
        valid_loss=_valid_loss(material, case, directory),
    )


def _valid_loss(material: Material, case: Case, directory: Path) -> float | None:
    """None for the case of long texts, which trains for a few steps only."""
    if case.long_texts:
        return None
    examples = directory / "valid.jsonl"
    with examples.open("w") as file:
        for (sequence,) in material.dataset(case, material.validation_file):
            line = {"ids": sequence.input_ids.tolist(), "learnt": sequence.target_mask.tolist()}
            file.write(json.dumps(line) + "\n")
    arguments = [str(material.model), str(directory / "result"), str(examples)]
    return float(run_python(["-m", "bench.finetuning.score", *arguments], threads=RANKS))


def resident_after_import(module: str) -> int:
    """Bytes of a process that has done nothing else."""
    program = f"import {module}, psutil; print(psutil.Process().memory_info().rss)"
    return int(run_python(["-c", program], threads=1))


def torchrun(module: str, argument: Path, ranks: int = RANKS) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    run_python([*launcher, "-m", module, str(argument)], threads=1)


def run_python(arguments: list[str], threads: int) -> str:
    offline = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | offline,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    if done.returncode:
        raise RunFailed(last_word(_of_first_rank(done.stderr), done.returncode))
    return done.stdout


def _of_first_rank(text: str) -> str:
    """Without what torchrun adds: its own exception is not the cause."""
    return text.split("torch.distributed.elastic", 1)[0] or text


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
