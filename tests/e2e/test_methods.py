"""Jobs of other methods through OpenAI's SDK, to results that peft and transformers read."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from sqlalchemy.orm import Session, sessionmaker
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM, AutoTokenizer

from jobs.tables import Model
from tests.e2e.conftest import Service
from tests.tiny_model import write_chat_file
from tests.zero_core.lora_runs import quiet_peft

TRAINING = {
    "max_steps": 6,
    "eval_steps": 6,
    "learning_rate": 3e-3,
    "zero_stage": 3,
    "train_batch_size": 4,
    "per_device_train_batch_size": 2,
}
BETA = 0.3


def write_pair_file(path: Path, pairs: int, seed: int = 0) -> Path:
    """Additions with the right answer preferred over a rude one."""
    with path.open("w") as file:
        for line in write_chat_file(path.with_suffix(".chat"), pairs, seed).read_text().splitlines():
            *asked, answer = json.loads(line)["messages"]
            pair = {
                "input": {"messages": asked},
                "preferred_output": [answer],
                "non_preferred_output": [{"role": "assistant", "content": "Who cares?"}],
            }
            file.write(json.dumps(pair) + "\n")
    return path


def run(service: Service, training: Path, validation: Path, settings: dict[str, Any], **extra: Any) -> Any:
    client = service.openai()
    files = [client.files.create(file=path, purpose="fine-tune").id for path in (training, validation)]
    job = client.fine_tuning.jobs.create(
        model="tiny",
        training_file=files[0],
        validation_file=files[1],
        extra_body={"training": TRAINING | settings, "resources": {"gpus": 2}},
        **extra,
    )
    job = service.ended(job.id)
    assert job.status == "succeeded", (job.error, service.log_of(job.id))
    return job


def last_evaluation(service: Service, job_id: str) -> dict[str, float]:
    events: Any = service.openai().fine_tuning.jobs.list_events(job_id)
    data: dict[str, float] = next(e.data for e in events if e.type == "metrics" and "valid_loss" in e.data)
    assert data["step"] == TRAINING["max_steps"]
    return data


def path_of(database: sessionmaker[Session], model: str, kind: str) -> Path:
    with database.begin() as session:
        row = session.get_one(Model, model)
        assert row.kind == kind
        return Path(row.path)


def log_prob(model: Any, tokenizer: Any, messages: list[dict[str, str]]) -> tuple[float, int]:
    """Of the last message with its end of turn, and in how many tokens: ChatML, written out here."""
    turns = [f"<|im_start|>{each['role']}\n{each['content']}<|im_end|>\n" for each in messages]
    ids = tokenizer("".join(turns).removesuffix("\n"), return_tensors="pt").input_ids
    begin = len(tokenizer("".join(turns[:-1]) + "<|im_start|>assistant\n").input_ids)
    with torch.no_grad():
        log_probs = torch.log_softmax(model(input_ids=ids).logits[0, :-1].double(), -1)
    return log_probs.gather(1, ids[0, 1:, None])[begin - 1 :].sum().item(), ids.shape[1] - begin


def test_a_lora_job_ends_in_an_adapter_that_peft_loads(
    service: Service, database: sessionmaker[Session], tmp_path: Path, tiny_model: Path
) -> None:
    validation = write_chat_file(tmp_path / "valid.jsonl", 6, seed=1)
    training = write_chat_file(tmp_path / "train.jsonl", 24)
    job = run(service, training, validation, {"lora": {"r": 4, "alpha": 8}})
    adapter = path_of(database, job.fine_tuned_model, "adapter")
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {path.name for path in adapter.iterdir()}

    base = AutoModelForCausalLM.from_pretrained(tiny_model)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    chats = [json.loads(line)["messages"] for line in validation.read_text().splitlines()]

    def loss(model: Any) -> float:
        sums, counts = zip(*(log_prob(model, tokenizer, chat) for chat in chats), strict=True)
        return -sum(sums) / sum(counts)

    start = loss(base)
    seen = last_evaluation(service, job.id)["valid_loss"]
    with quiet_peft():
        model = PeftModel.from_pretrained(base, adapter)
    assert loss(model) == pytest.approx(seen, rel=1e-4)
    assert seen < 0.98 * start


def test_a_preference_job_ends_in_a_model_of_which_its_rewards_are_true(
    service: Service, database: sessionmaker[Session], tmp_path: Path, tiny_model: Path
) -> None:
    validation = write_pair_file(tmp_path / "valid.jsonl", 6, seed=1)
    training = write_pair_file(tmp_path / "train.jsonl", 24)
    method: Any = {"type": "dpo", "dpo": {"hyperparameters": {"beta": BETA}}}
    job = run(service, training, validation, {"learning_rate": 3e-4}, method=method)
    seen = last_evaluation(service, job.id)

    result = path_of(database, job.fine_tuned_model, "fine_tuned")
    trained, start = (AutoModelForCausalLM.from_pretrained(path) for path in (result, tiny_model))
    tokenizer = AutoTokenizer.from_pretrained(result)
    margins = []
    for line in validation.read_text().splitlines():
        pair = json.loads(line)
        rewards = []
        for answer in ("preferred_output", "non_preferred_output"):
            chat = [*pair["input"]["messages"], *pair[answer]]
            after, before = (log_prob(model, tokenizer, chat)[0] for model in (trained, start))
            rewards.append(BETA * (after - before))
        margins.append(rewards[0] - rewards[1])
    true = torch.tensor(margins)
    assert seen["valid_loss"] == pytest.approx(-logsigmoid(true).mean().item(), rel=1e-3)
    assert seen["valid_rewards/margins"] == pytest.approx(true.mean().item(), rel=1e-3)
    assert seen["valid_loss"] < 0.65
