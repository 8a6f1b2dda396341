"""The training loop on real files: the plan never shows in the result, and a stop loses nothing."""

import json
import signal
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.tiny_model import write_chat_file, write_tiny_model
from tests.zero_core.ranks import RankError, RankPool
from zero_core import TrainConfig
from zero_core.config.offload import OffloadConfig
from zero_core.training.journal import Journal
from zero_core.training.loop import attempt
from zero_core.training.run import Outcome, Run, StopRequest

TRAIN: dict[str, Any] = {
    "num_train_epochs": 2,
    "train_batch_size": 5,
    "learning_rate": 2e-3,
    "warmup_steps": 2,
    "weight_decay": 0.1,
    "save_steps": 3,
}
STEPS = 10
"""24 examples, twice, five a step: the last batch and an epoch's end cut across."""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("inputs")
    write_tiny_model(directory / "model")
    write_chat_file(directory / "train.jsonl", 24)
    write_chat_file(directory / "valid.jsonl", 7, seed=1)
    return directory


def write_run(inputs: Path, directory: Path, resume: list[str] | None = None, **train: Any) -> Path:
    directory.mkdir(parents=True)
    run = {
        "job_id": "ftjob-test",
        "epoch": 1,
        "model_path": str(inputs / "model"),
        "training_file": str(inputs / "train.jsonl"),
        "validation_file": str(inputs / "valid.jsonl"),
        "train": asdict(TrainConfig(**TRAIN | train)),
        "min_examples": 10,
        "resume": resume or [],
        "export_dir": str(directory / "export"),
        "hang_seconds": 60,
    }
    (directory / "run.json").write_text(json.dumps(run))
    return directory


def run_loop(directory: Path, sigterm_at_step: int | None = None) -> Outcome:
    """What ``zero_core.train`` does with a process group that is there already."""
    run, rank = Run.read(directory), dist.get_rank()
    previous = signal.getsignal(signal.SIGTERM)
    try:
        stop = StopRequest(directory)
        journal = StoppingJournal(directory, rank, sigterm_at_step)
        return attempt(run, torch.device("cpu"), journal, stop)
    finally:
        signal.signal(signal.SIGTERM, previous)


class StoppingJournal(Journal):
    """Sends this process SIGTERM, on rank 1 alone, once a step is reported."""

    def __init__(self, directory: Path, rank: int, sigterm_at_step: int | None) -> None:
        super().__init__(directory, rank)
        self._sigterm_at_step = sigterm_at_step if rank == 1 else None

    def telemetry(self, step: int, *args: Any) -> None:
        super().telemetry(step, *args)
        if step == self._sigterm_at_step:
            signal.raise_signal(signal.SIGTERM)


def events(directory: Path, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def losses(directory: Path) -> list[float]:
    return [line["train_loss"] for line in events(directory, "metrics")]


@pytest.fixture(scope="module")
def one_rank(pools: dict[int, RankPool], inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that others are held against: one rank, the whole batch at once, nothing sharded."""
    directory = write_run(
        inputs, tmp_path_factory.mktemp("one") / "a1", zero_stage=0, per_device_train_batch_size=5
    )
    assert pools[1].run(run_loop, directory)[0] == Outcome("succeeded", step=STEPS)
    return directory


@pytest.mark.parametrize(
    ("world_size", "stage", "micro_batch", "offload"),
    [
        (1, 0, 1, OffloadConfig()),
        (1, 3, 2, OffloadConfig("disk", "disk")),
        (2, 3, 1, OffloadConfig("disk", "disk")),
        (2, 1, 2, OffloadConfig("disk")),
        (3, 3, 2, OffloadConfig()),
        (4, 2, 3, OffloadConfig("host")),
        (4, 3, 1, OffloadConfig()),
    ],
)
def test_the_plan_does_not_show_in_the_result(
    pools: dict[int, RankPool],
    inputs: Path,
    one_rank: Path,
    tmp_path: Path,
    world_size: int,
    stage: int,
    micro_batch: int,
    offload: OffloadConfig,
) -> None:
    directory = write_run(
        inputs, tmp_path / "a1", zero_stage=stage, per_device_train_batch_size=micro_batch, offload=offload
    )
    outcomes = pools[world_size].run(run_loop, directory)
    assert outcomes == [Outcome("succeeded", step=STEPS)] * world_size
    assert losses(directory) == pytest.approx(losses(one_rank), rel=1e-5)
    for ours, theirs in zip(events(directory, "evaluation"), events(one_rank, "evaluation"), strict=True):
        assert ours["step"] == theirs["step"]
        assert ours["valid_loss"] == pytest.approx(theirs["valid_loss"], rel=1e-5)
    assert [e["trained_tokens"] for e in events(directory, "metrics")] == [
        e["trained_tokens"] for e in events(one_rank, "metrics")
    ]


def test_what_a_run_reports(one_rank: Path) -> None:
    (start,) = events(one_rank, "start")
    assert (start["total_steps"], start["step"], start["resumed_from"]) == (STEPS, 0, None)
    assert [line["step"] for line in events(one_rank, "metrics")] == list(range(1, STEPS + 1))
    assert [line["step"] for line in events(one_rank, "evaluation")] == [0, 5, 10]
    assert [line["step"] for line in events(one_rank, "checkpoint")] == [3, 6, 9, 10]
    assert [Path(line["path"]).name for line in events(one_rank, "pruned")] == ["step-3", "step-6"]
    assert sorted(path.name for path in one_rank.glob("step-*")) == ["step-10", "step-9"]
    evaluations = events(one_rank, "evaluation")
    assert evaluations[-1]["valid_loss"] < evaluations[0]["valid_loss"]


def test_telemetry_has_every_rank_and_step(pools: dict[int, RankPool], inputs: Path, tmp_path: Path) -> None:
    directory = write_run(inputs, tmp_path / "a1", max_steps=3)
    pools[2].run(run_loop, directory)
    (start,) = events(directory, "start")
    for rank in range(2):
        lines = [json.loads(line) for line in (directory / f"rank-{rank}.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines] == [1, 2, 3]
        for line in lines:
            held = {name: usage["current"]["device"] for name, usage in line["memory"].items()}
            assert held.keys() == {
                "parameters", "gradients", "optimizer", "communication", "idle", "activations", "other"
            }  # fmt: skip
            expected = start["model_state_bytes"]
            for category in ("parameters", "optimizer"):
                assert held[category] == pytest.approx(expected[category], rel=0.01)
            # Of gradients the lines have the peak: the shards, and what is whole before its reduction.
            gradients = line["memory"]["gradients"]["peak"]["device"]
            assert 0.99 * expected["gradients"] < gradients <= 3 * expected["gradients"]
            assert line["resident_peak"] >= line["resident"] > 0


@pytest.mark.parametrize(("world_size", "stage"), [(2, 3), (3, 1)])
def test_sigterm_to_one_rank_pauses_all_and_a_resume_is_bit_exact(
    pools: dict[int, RankPool], inputs: Path, tmp_path: Path, world_size: int, stage: int
) -> None:
    whole = write_run(inputs, tmp_path / "whole", zero_stage=stage)
    pools[world_size].run(run_loop, whole)
    first = write_run(inputs, tmp_path / "a1", zero_stage=stage)
    outcomes = pools[world_size].run(run_loop, first, 4)
    assert outcomes == [Outcome("paused", "paused_by_user", step=4)] * world_size
    second = write_run(inputs, tmp_path / "a2", [str(first / "step-4")], zero_stage=stage)
    pools[world_size].run(run_loop, second)
    assert losses(first) + losses(second) == losses(whole)
    for name in ("model-00001-of-0000", "model-00002-of-0000"):
        ours = load_file(second / "export" / f"{name}{world_size}.safetensors")
        theirs = load_file(whole / "export" / f"{name}{world_size}.safetensors")
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_a_damaged_checkpoint_is_passed_over_for_an_older_good_one(
    pools: dict[int, RankPool], inputs: Path, tmp_path: Path
) -> None:
    first = write_run(inputs, tmp_path / "a1", max_steps=6, save_steps=2)
    pools[2].run(run_loop, first)
    (first / "step-6" / "rank-00001.safetensors").unlink()
    resume = [str(first / "step-6"), str(first / "step-4")]
    second = write_run(inputs, tmp_path / "a2", resume, max_steps=6, save_steps=2)
    assert pools[2].run(run_loop, second)[0] == Outcome("succeeded", step=6)
    (start,) = events(second, "start")
    assert (start["step"], start["resumed_from"]) == (4, str(first / "step-4"))
    (warning,) = [e for e in events(second, "message") if e["level"] == "warn"]
    assert "step-6" in warning["message"]
    assert losses(second) == losses(first)[4:]


def test_a_cancel_writes_no_checkpoint(pools: dict[int, RankPool], inputs: Path, tmp_path: Path) -> None:
    directory = write_run(inputs, tmp_path / "a1")
    (directory / "control.json").write_text('{"action": "cancel"}')
    outcomes = pools[2].run(run_loop, directory)
    assert outcomes == [Outcome("cancelled", "cancelled_by_user", step=0)] * 2
    assert not list(directory.glob("step-*"))


def test_the_export_loads_in_transformers_and_is_the_trained_model(
    pools: dict[int, RankPool], inputs: Path, tmp_path: Path
) -> None:
    directory = write_run(inputs, tmp_path / "a1")
    pools[3].run(run_loop, directory)
    model, loading = AutoModelForCausalLM.from_pretrained(
        directory / "export", output_loading_info=True, local_files_only=True
    )
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokenizer = AutoTokenizer.from_pretrained(directory / "export")
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(inputs / "model").chat_template
    untrained = AutoModelForCausalLM.from_pretrained(inputs / "model")
    assert not torch.equal(model.lm_head.weight, untrained.lm_head.weight)
    (exported,) = events(directory, "exported")
    assert exported["bytes"] == sum(4 * p.numel() for p in model.parameters())


def test_a_learning_rate_that_explodes_ends_as_nan_loss(
    pools: dict[int, RankPool], inputs: Path, tmp_path: Path
) -> None:
    directory = write_run(inputs, tmp_path / "a1", learning_rate=1e30, warmup_steps=0, max_grad_norm=None)
    with pytest.raises(RankError, match=r"not finite for 3 steps in a row up to step \d+"):
        pools[2].run(run_loop, directory)
    assert [e["skipped"] for e in events(directory, "metrics")][-3:] == [True] * 3


@pytest.mark.parametrize(
    "template", [None, "{% for message in messages %}{{ message['content'] }}{% endfor %}"]
)
def test_the_export_is_its_base_but_for_the_weights(
    pools: dict[int, RankPool], inputs: Path, tmp_path: Path, template: str | None
) -> None:
    source = tmp_path / "bf16"
    model = AutoModelForCausalLM.from_pretrained(inputs / "model", dtype=torch.bfloat16)
    model.config.attention_dropout = 0.25
    model.save_pretrained(source)
    AutoTokenizer.from_pretrained(inputs / "model").save_pretrained(source)
    config = json.loads((source / "config.json").read_text())
    del config["dtype"]
    (source / "config.json").write_text(json.dumps(config))
    directory = write_run(inputs, tmp_path / "a1", max_steps=1, chat_template=template)
    run = json.loads((directory / "run.json").read_text())
    (directory / "run.json").write_text(json.dumps(run | {"model_path": str(source)}))
    pools[2].run(run_loop, directory)
    before, after = (
        {file.name: file.read_bytes() for file in path.iterdir() if file.suffix != ".safetensors"}
        for path in (source, directory / "export")
    )
    del after["model.safetensors.index.json"]
    if template is not None:
        before["chat_template.jinja"] = template.encode()
    assert after == before
    assert AutoModelForCausalLM.from_pretrained(directory / "export").dtype == torch.bfloat16


def test_a_length_beyond_the_models_positions_is_cut_to_them_and_said(
    pools: dict[int, RankPool], inputs: Path, tmp_path: Path
) -> None:
    positions = json.loads((inputs / "model" / "config.json").read_text())["max_position_embeddings"]
    directory = write_run(inputs, tmp_path / "a1", max_steps=1, max_length=positions + 1)
    pools[1].run(run_loop, directory)
    warnings = [event["message"] for event in events(directory, "message")]
    assert f"max_length {positions + 1} is more than the model's {positions} positions" in warnings[0]


@pytest.mark.parametrize(
    ("world_size", "plan"),
    [
        (1, {"packing": False, "per_device_train_batch_size": 5}),
        (2, {"per_device_max_tokens": 300, "zero_stage": 3}),
        (2, {"logits_bytes": 4 * 258 * 16, "zero_stage": 3, "per_device_train_batch_size": 3}),
        (3, {"packing": False, "per_device_max_tokens": 400, "logits_bytes": 1, "zero_stage": 2}),
    ],
)
def test_packing_and_pieces_do_not_show_in_the_result(
    pools: dict[int, RankPool],
    inputs: Path,
    one_rank: Path,
    tmp_path: Path,
    world_size: int,
    plan: dict[str, Any],
) -> None:
    directory = write_run(inputs, tmp_path / "a1", **plan)
    assert pools[world_size].run(run_loop, directory) == [Outcome("succeeded", step=STEPS)] * world_size
    assert losses(directory) == pytest.approx(losses(one_rank), rel=1e-5)
    for ours, theirs in zip(events(directory, "metrics"), events(one_rank, "metrics"), strict=True):
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
        assert ours["occupancy"] == 1.0 if plan.get("packing", True) else ours["occupancy"] < 1.0


def test_an_epoch_trains_every_example_once(pools: dict[int, RankPool], inputs: Path, tmp_path: Path) -> None:
    directory = write_run(inputs, tmp_path / "a1", train_batch_size=64, num_train_epochs=1, save_steps=None)
    assert pools[2].run(run_loop, directory)[0] == Outcome("succeeded", step=1)
    (metrics,) = events(directory, "metrics")
    whole = write_run(inputs, tmp_path / "a2", train_batch_size=24, num_train_epochs=1, save_steps=None)
    pools[1].run(run_loop, whole)
    assert metrics["epoch"] == 1.0
    assert metrics["trained_tokens"] == events(whole, "metrics")[0]["trained_tokens"]


def test_samples_are_what_the_model_says(
    pools: dict[int, RankPool], inputs: Path, one_rank: Path, tmp_path: Path
) -> None:
    directory = write_run(inputs, tmp_path / "a1", eval_samples=2, eval_sample_tokens=8, zero_stage=3)
    pools[2].run(run_loop, directory)
    said = events(directory, "sample")
    assert [line["step"] for line in said] == [0, 0, 5, 5, 10, 10]
    tokenizer = AutoTokenizer.from_pretrained(inputs / "model")
    model = AutoModelForCausalLM.from_pretrained(directory / "export")
    rows = [json.loads(line) for line in (inputs / "valid.jsonl").read_text().splitlines()[:2]]
    for row, line in zip(rows, said[-2:], strict=True):
        encoded = tokenizer.apply_chat_template(
            row["messages"][:-1], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        tokens = model.generate(**encoded, max_new_tokens=8, do_sample=False)
        length = encoded["input_ids"].shape[1]
        assert line["answer"] == tokenizer.decode(tokens[0, length:], skip_special_tokens=True).strip()
        assert line["reference"] == row["messages"][-1]["content"][:8].strip()
        assert row["messages"][-2]["content"] in line["prompt"]
    assert losses(directory) == pytest.approx(losses(one_rank), rel=1e-5)


def test_precision_stays_what_the_run_began_with(
    pools: dict[int, RankPool], inputs: Path, tmp_path: Path
) -> None:
    first = write_run(inputs, tmp_path / "a1", max_steps=2, save_steps=1, precision="bf16")
    pools[1].run(run_loop, first)
    second = write_run(inputs, tmp_path / "a2", [str(first / "step-1")], max_steps=2, save_steps=1)
    pools[1].run(run_loop, second)
    assert losses(second) == losses(first)[1:]
