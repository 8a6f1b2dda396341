"""``finetune.json`` and ``finetune.md``: medians by engine, and the goals."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from pydantic import TypeAdapter

from bench.finetuning.task import WARM_UP, Case, Engine, Measured
from bench.machine import Machine
from bench.markdown import table

SPEED_GOALS: dict[Engine, float] = {"trl-ddp": 1.5, "trl-fsdp2": 2.5}
"""Times the peer's useful tokens a second, at an equal validation loss."""

EQUAL_LOSS = 0.01
"""Relative difference of validation losses that counts as none."""

MEMORY_GOAL = 0.5
"""Of the peer's peak, with long texts."""

HOW = f"""\
The same fine-tuning by this project (`python -m zero_core.train` under torchrun, stage 2, packed rows) and by
TRL's SFTTrainer as its users run it with accelerate: the same model, examples, order, batches, learning rates
and optimizer, in fp32, on two ranks with a thread each. TRL is given the token ids and labels, so that its
data are surely the same. Runs take turns. A step is timed from end to end; a run's first {WARM_UP} do not
count. "Tokens a second" are tokens of examples, padding not counted. "Peak" is the resident memory of the
rank that took most, "growth" what it is above the imports. "Loss" is the validation loss of the result,
computed in plain transformers. All are medians over the runs. Activation checkpointing is TRL's default,
and off in ours, which is measured with it where the texts are long; rows say which.
"""


@dataclass(frozen=True)
class Row:
    engine: Engine
    checkpointing: bool
    measured: list[Measured]
    failure: str | None = None

    @property
    def name(self) -> str:
        return f"{self.engine}, activation checkpointing" if self.checkpointing else self.engine

    def median(self, of: str) -> float:
        return median(getattr(each, of) for each in self.measured)

    @property
    def growth(self) -> float:
        return median(each.peak_bytes - each.imports_bytes for each in self.measured)


@dataclass(frozen=True)
class Results:
    """Of one case: each is measured by itself, and the file keeps the others'."""

    case: Case
    machine: Machine
    command: str
    rows: list[Row]


_FILE = TypeAdapter(dict[str, Results])


@dataclass(frozen=True)
class Verdict:
    goal: str
    measured: float
    limit: float
    met: bool


def write(results: Results, directory: Path) -> None:
    """In place of what ``directory`` has of the same case."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "finetune.json"
    everything = _FILE.validate_json(path.read_bytes()) if path.exists() else {}
    everything[results.case.name] = results
    path.write_bytes(_FILE.dump_json(everything, indent=1) + b"\n")
    (directory / "finetune.md").write_text(render(list(everything.values())))


def render(measured: Sequence[Results]) -> str:
    judged = [
        (v.goal, f"{v.measured:.2f}", f"{v.limit:g}", _word(v.met))
        for results in measured
        for v in verdicts(results)
    ]
    parts = [
        "# Fine-tuning beside TRL",
        HOW.rstrip(),
        "## Goals",
        table(("goal", "measured", "limit", "verdict"), judged),
    ]
    for results in measured:
        case = results.case
        sizes = f"{case.steps} steps of {case.batch_size} examples, at most {case.max_length} tokens"
        parts += [
            f"## {case.name}: {sizes}",
            table(
                ("engine", "tokens a second", "peak, MB", "growth, MB", "loss", "runs"),
                [_cells(row) for row in results.rows],
            ),
            f"{results.machine.title}. Measured with `{results.command}`.",
        ]
    return "\n\n".join(parts) + "\n"


def verdicts(results: Results) -> list[Verdict]:
    """Ours against each peer of the goals in each setting that ran; memory in the same setting only."""
    case = results.case
    ran = [row for row in results.rows if row.measured]
    found = []
    for ours in (row for row in ran if row.engine == "shardyard"):
        for peer in (row for row in ran if row.engine in SPEED_GOALS):
            if case.long_texts:
                if ours.checkpointing == peer.checkpointing:
                    ratio = ours.growth / peer.growth
                    goal = f"{case.name}: growth, of {peer.name}"
                    found.append(Verdict(goal, ratio, MEMORY_GOAL, ratio <= MEMORY_GOAL))
                continue
            ratio = ours.median("tokens_per_second") / peer.median("tokens_per_second")
            limit = SPEED_GOALS[peer.engine]
            same = abs(ours.median("valid_loss") / peer.median("valid_loss") - 1) <= EQUAL_LOSS
            goal = f"{case.name}: speed, over {peer.name}"
            found.append(Verdict(goal, ratio, limit, same and ratio >= limit))
    return found


def _cells(row: Row) -> tuple[str, ...]:
    if not row.measured:
        return (row.name, "failed", "", "", "", (row.failure or "").splitlines()[-1][:80])
    loss = "" if row.measured[0].valid_loss is None else f"{row.median('valid_loss'):.4f}"
    return (
        row.name,
        f"{row.median('tokens_per_second'):.1f}",
        f"{row.median('peak_bytes') / 1e6:.0f}",
        f"{row.growth / 1e6:.0f}",
        loss,
        str(len(row.measured)),
    )


def _word(met: bool) -> str:
    return "met" if met else "**not met**"
