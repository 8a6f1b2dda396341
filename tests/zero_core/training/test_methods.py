"""Whole runs of the methods: on every plan the same, and results that others load."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.tiny_model import write_chat_file, write_tiny_model
from tests.zero_core.lora_runs import quiet_peft
from tests.zero_core.ranks import RankPool
from tests.zero_core.training.test_loop import events, losses, run_loop, write_run
from zero_core.training.run import Outcome

LORA = {"r": 4, "alpha": 32.0}
DPO = {
    "method": "dpo",
    "num_train_epochs": 2,
    "train_batch_size": 4,
    "learning_rate": 1e-3,
    "warmup_steps": 0,
    "save_steps": 2,
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("methods")
    write_tiny_model(directory / "model", hidden=64)
    write_chat_file(directory / "train.jsonl", 24)
    write_chat_file(directory / "valid.jsonl", 7, seed=1)
    return directory


@pytest.fixture(scope="module")
def preferences(inputs: Path) -> dict[str, str]:
    """Answers in the right order are preferred to the same backwards."""
    files = {}
    for name in ("training_file", "validation_file"):
        source = inputs / ("train.jsonl" if name == "training_file" else "valid.jsonl")
        path = inputs / f"{name}-pairs.jsonl"
        with path.open("w") as file:
            for line in source.read_text().splitlines()[:12]:
                *prompt, answer = json.loads(line)["messages"]
                worse = answer | {"content": answer["content"][::-1] + "?"}
                pair = {
                    "input": {"messages": prompt},
                    "preferred_output": [answer],
                    "non_preferred_output": [worse],
                }
                file.write(json.dumps(pair) + "\n")
        files[name] = str(path)
    return files


def write(
    inputs: Path, directory: Path, files: dict[str, str], resume: list[str] | None = None, **train: Any
) -> Path:
    write_run(inputs, directory, resume, **train)
    run = json.loads((directory / "run.json").read_text())
    (directory / "run.json").write_text(json.dumps(run | files))
    return directory


def validation_loss(model: Any, inputs: Path, like: Path) -> float:
    """Of a loaded model, in plain transformers: what an evaluation of the engine says."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(inputs / "model")
    total, tokens = 0.0, 0
    for line in like.read_text().splitlines():
        messages = json.loads(line)["messages"]
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        prompt = tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text.rstrip("\n"), return_tensors="pt")["input_ids"]
        start = len(tokenizer(prompt)["input_ids"])
        with torch.no_grad():
            log_probs = torch.log_softmax(model(input_ids=ids).logits[0].float(), -1)
        picked = log_probs[start - 1 : -1].gather(1, ids[0, start:, None])
        total -= picked.sum().item()
        tokens += len(picked)
    return total / tokens


@pytest.fixture(scope="module")
def lora_on_one_rank(
    pools: dict[int, RankPool], inputs: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    directory = write_run(inputs, tmp_path_factory.mktemp("lora") / "a1", zero_stage=0, lora=LORA)
    assert pools[1].run(run_loop, directory)[0].status == "succeeded"
    return directory


@pytest.mark.parametrize(("world_size", "stage"), [(2, 3), (3, 1)])
def test_a_lora_run_is_the_same_on_every_plan(
    pools: dict[int, RankPool],
    inputs: Path,
    lora_on_one_rank: Path,
    tmp_path: Path,
    world_size: int,
    stage: int,
) -> None:
    directory = write_run(inputs, tmp_path / "a1", zero_stage=stage, per_device_max_tokens=400, lora=LORA)
    assert pools[world_size].run(run_loop, directory)[0].status == "succeeded"
    assert losses(directory) == pytest.approx(losses(lora_on_one_rank), rel=1e-5)
    assert losses(directory)[-1] < losses(directory)[0]


def test_the_adapter_over_the_base_is_what_the_engine_evaluated(lora_on_one_rank: Path, inputs: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(inputs / "model")
    before, *_, after = events(lora_on_one_rank, "evaluation")
    assert validation_loss(base, inputs, inputs / "valid.jsonl") == pytest.approx(
        before["valid_loss"], rel=1e-4
    )
    names = {path.name for path in (lora_on_one_rank / "export").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= names
    assert not names & {"config.json", "model.safetensors.index.json"}
    with quiet_peft():
        model = PeftModel.from_pretrained(base, lora_on_one_rank / "export")
    assert validation_loss(model, inputs, inputs / "valid.jsonl") == pytest.approx(
        after["valid_loss"], rel=1e-4
    )


@pytest.mark.parametrize("quantization", ["nf4", "int8"])
def test_a_merged_model_on_a_quantized_base_is_what_the_engine_evaluated(
    pools: dict[int, RankPool], inputs: Path, tmp_path: Path, quantization: str
) -> None:
    lora = LORA | {"quantization": quantization, "merge": True}
    directory = write_run(inputs, tmp_path / "a1", zero_stage=3, lora=lora)
    assert pools[2].run(run_loop, directory)[0].status == "succeeded"
    (start,) = events(directory, "start")
    held = json.loads((directory / "rank-0.jsonl").read_text().splitlines()[-1])["memory"]
    expected = start["model_state_bytes"]["parameters"]
    assert held["parameters"]["current"]["device"] == pytest.approx(expected, rel=1e-3)
    model = AutoModelForCausalLM.from_pretrained(directory / "export")
    evaluated = events(directory, "evaluation")[-1]["valid_loss"]
    assert validation_loss(model, inputs, inputs / "valid.jsonl") == pytest.approx(evaluated, rel=1e-4)


@pytest.mark.parametrize("lora", [None, LORA])
def test_dpo_is_the_same_on_every_plan_and_after_a_pause(
    pools: dict[int, RankPool], inputs: Path, preferences: dict[str, str], tmp_path: Path, lora: Any
) -> None:
    settings = DPO | {"lora": lora}
    whole = write(inputs, tmp_path / "one" / "a1", preferences, zero_stage=0, packing=False, **settings)
    assert pools[1].run(run_loop, whole) == [Outcome("succeeded", step=6)]
    first = write(inputs, tmp_path / "two" / "a1", preferences, zero_stage=3, **settings)
    assert pools[2].run(run_loop, first, 3)[0] == Outcome("paused", "paused_by_user", step=3)
    second = write(
        inputs, tmp_path / "two" / "a2", preferences, [str(first / "step-3")], zero_stage=2, **settings
    )
    assert pools[3].run(run_loop, second)[0] == Outcome("succeeded", step=6)
    expected = events(whole, "metrics")
    found = events(first, "metrics") + events(second, "metrics")
    for ours, theirs in zip(found, expected, strict=True):
        for name in ("train_loss", "rewards/chosen", "rewards/rejected", "rewards/margins"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=2e-5), (ours["step"], name)
        assert ours["rewards/accuracies"] == theirs["rewards/accuracies"] == ours["train_accuracy"]
    last = events(whole, "evaluation")[-1]
    assert last["valid_rewards/margins"] > 0
    assert last["valid_loss"] < events(whole, "evaluation")[0]["valid_loss"]
    # The starting model was asked once for each file, in the first attempt.
    assert len(list((tmp_path / "two").glob("log-probs-at-start-*.npy"))) == 2
    assert [e["phase"] for e in events(first, "phase")].count("referencing") == 1
