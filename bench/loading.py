"""``python -m bench.loading``: a rank's memory from its start to its last step, at stage 3 on four ranks.

SmolLM2-135M in fp32, with the demo's conversations. What a rank needs is what ZeRO says: a quarter of the
states, the largest unit, and the activations of its micro-batch, which a plain model is measured for.
"""

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from bench.finetuning.material import Material, make_material
from bench.finetuning.runs import lines_of, resident_after_import, run_python, torchrun, write_run
from bench.finetuning.task import Case
from bench.launch import ROOT
from bench.machine import Machine, this_machine
from bench.markdown import table
from zero_core.config.train import TrainConfig
from zero_core.data.batches import Dealer, global_batch
from zero_core.planner.formulas import model_state_bytes

DIRECTORY = ROOT / "docs" / "benchmarks"
RANKS = 4
LIMIT = 1.1
"""Of what ZeRO says."""
CASE = Case("chat", lora=False, learning_rate=5e-5, batch_size=16, max_length=192, steps=3)
TRAIN = TrainConfig(
    max_steps=CASE.steps,
    train_batch_size=CASE.batch_size,
    per_device_max_tokens=1024,
    max_length=CASE.max_length,
    zero_stage=3,
    precision="fp32",
    eval_on_start=False,
)


@dataclass(frozen=True)
class Loading:
    machine: Machine
    imports: int
    """Resident bytes of a process that has imported the trainer."""
    loading: int
    """The most that a rank took until its first step, beyond the imports."""
    training: int
    """The most in a step, likewise."""
    states: int
    """A rank's part of parameters, gradients and optimizer state, by the closed formula."""
    largest_unit: int
    """Gathered: the embedding table."""
    activations: int
    """What the fullest micro-batch takes beside a plain model, the table's whole gradient included."""

    @property
    def expected(self) -> int:
        return self.states + self.largest_unit + self.activations


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        material = make_material(Path(scratch) / "data", CASE)
        measured = measure(material, Path(scratch))
    (DIRECTORY / "loading.json").write_bytes(TypeAdapter(Loading).dump_json(measured, indent=1) + b"\n")
    (DIRECTORY / "loading.md").write_text(render(measured))


def measure(material: Material, scratch: Path) -> Loading:
    attempt = write_run(material, TRAIN, scratch)
    torchrun("zero_core.train", attempt, RANKS)
    start = next(event for event in lines_of(attempt / "events.jsonl") if event["kind"] == "start")
    telemetry = [line for rank in range(RANKS) for line in lines_of(attempt / f"rank-{rank}.jsonl")]
    imports = resident_after_import("zero_core.training.train")
    states = model_state_bytes(start["parameters"], RANKS, 3, "fp32")
    shape = json.loads((material.model / "config.json").read_bytes())
    return Loading(
        machine=this_machine(),
        imports=imports,
        loading=start["resident_peak"] - imports,
        training=max(line["resident_peak"] for line in telemetry) - imports,
        states=sum(states.values()),
        largest_unit=4 * shape["vocab_size"] * shape["hidden_size"],
        activations=_activations(material, scratch),
    )


def _activations(material: Material, scratch: Path) -> int:
    """Of the fullest micro-batch of the run."""
    dataset = material.dataset(CASE, material.training_file)
    dealer = Dealer(RANKS, 1, TRAIN.per_device_max_tokens, packed=True)
    steps = [dealer.deal(global_batch(dataset, step, TRAIN)) for step in range(CASE.steps)]
    micro_batches = [items for step in steps for ranks in step for items in ranks]
    fullest = max(micro_batches, key=lambda items: sum(item.length for item in items))
    sequences = [item.sample[0] for item in fullest]
    task = {
        "logits_bytes": TRAIN.logits_bytes,
        "examples": [(each.input_ids.tolist(), each.target_mask.tolist()) for each in sequences],
    }
    path = scratch / "micro-batch.json"
    path.write_text(json.dumps(task))
    program = ["-m", "bench.finetuning.activations", str(material.model), str(path)]
    return int(run_python(program, threads=1))


def render(measured: Loading) -> str:
    def row(name: str, nbytes: int) -> tuple[str, str]:
        return name, f"{nbytes / 1e6:,.0f}"

    ratio = measured.training / measured.expected
    verdict = "met" if ratio <= LIMIT else "**not met**"
    parts = [
        "# A rank's memory at stage 3",
        " ".join((__doc__ or "").split("\n\n", 1)[1].split()),
        f"{measured.machine.title}. Measured with `python -m bench.loading`.",
        table(
            ("beyond the imports", "MB"),
            [
                row(f"states, of {RANKS} ranks", measured.states),
                row("largest unit, gathered", measured.largest_unit),
                row("activations and the largest unit's gradient, in plain PyTorch", measured.activations),
                row("expected", measured.expected),
                row("most in a step, resident", measured.training),
                row("most in loading, resident", measured.loading),
            ],
        ),
        f"In a step {ratio:.2f} times what is expected; at most {LIMIT} was the goal: {verdict}.",
    ]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    main()
