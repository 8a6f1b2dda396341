"""DPO against TRL's trainer on the same pairs, and the same on every plan."""

import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset as Table
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig as TrlConfig
from trl import DPOTrainer

from tests.tiny_model import write_tiny_model
from tests.zero_core.ranks import RankPool
from zero_core import AdamWConfig, TrainConfig, ZeroConfig, ZeroEngine
from zero_core.config.dpo import DpoConfig
from zero_core.data.batches import global_batch
from zero_core.data.dataset import Dataset
from zero_core.models.token_scores import TokenScorer
from zero_core.training.methods.dpo import DirectPreference
from zero_core.training.micro_batches import MicroBatches, score
from zero_core.training.packing import packs
from zero_core.training.starting_model import log_probs_at_start

PAIRS = [
    ("the sky is ", "blue", "made of cheese"),
    ("two and two are ", "four", "five, or so they say"),
    ("water is ", "wet and clear", "dry"),
    ("a cat says ", "meow", "woof woof woof"),
]
LEARNING_RATE = 1e-3
STEPS = 3
METRICS = ("loss", "grad_norm", "rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies")


@dataclass(frozen=True)
class Run:
    log: list[dict[str, float]]
    start: np.ndarray


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("dpo") / "model")


def pairs(tokenizer: object) -> Dataset:
    """Prompt and answer with its end, the answers to learn: as TRL makes of text."""
    ids: list[int] = []
    mask: list[bool] = []
    offsets = [0]
    for prompt, *answers in PAIRS:
        for answer in answers:
            before = tokenizer(prompt)["input_ids"]
            after = [*tokenizer(answer)["input_ids"], tokenizer.eos_token_id]
            ids += before + after
            mask += [False] * len(before) + [True] * len(after)
            offsets.append(len(ids))
    return preferences(np.array(ids, np.int32), np.array(mask), np.array(offsets))


def preferences(ids: np.ndarray, mask: np.ndarray, offsets: np.ndarray) -> Dataset:
    return Dataset(input_ids=ids, target_mask=mask, offsets=offsets, sequences=2)


def train_on_engine(model_path: str, kept: str, stage: int, rows: int, packed: bool) -> Run:
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    model = AutoModelForCausalLM.from_pretrained(model_path)
    train = TrainConfig(train_batch_size=len(PAIRS), per_device_train_batch_size=rows, method="dpo")
    world_size = torch.distributed.get_world_size()
    TokenScorer(model, train.logits_bytes)
    config = ZeroConfig(
        stage=stage, gradient_accumulation_steps=train.accumulation_steps(world_size), gradient_clipping=None
    )
    engine = ZeroEngine(model, config, AdamWConfig(lr=LEARNING_RATE))
    assert packs(engine, model, len(tokenizer))
    data = pairs(tokenizer)
    micro_batches = MicroBatches(engine, train, tokenizer.eos_token_id, packed=packed)
    start = log_probs_at_start(engine, data, micro_batches, Path(kept), lambda: None)
    objective = DirectPreference(DpoConfig(), start)
    log = []
    for _ in range(STEPS):
        sums = torch.zeros(len(objective.sums), dtype=torch.float64)
        mine = micro_batches.of_step(global_batch(data, 0, train))
        engine.accumulate(len(mine))
        for some in mine:
            batch = micro_batches.collate(some)
            loss = objective.loss(score(engine, batch), batch)
            engine.backward(loss.mean, loss.weight)
            report = engine.step()
            sums += torch.tensor(loss.sums, dtype=torch.float64)
        assert report is not None
        totals = engine.communicator.agree(sums).tolist()
        metrics = objective.metrics(dict(zip(objective.sums, totals, strict=True)), report.target_tokens)
        log.append(metrics | {"grad_norm": report.grad_norm})
    engine.close()
    return Run(log, start)


@pytest.fixture(scope="module")
def trl(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    table = Table.from_list(
        [dict(zip(("prompt", "chosen", "rejected"), pair, strict=True)) for pair in PAIRS]
    )
    config = TrlConfig(
        output_dir=str(tmp_path_factory.mktemp("trl")),
        per_device_train_batch_size=len(PAIRS),
        max_steps=STEPS,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        max_grad_norm=1e9,
        logging_steps=1,
        use_cpu=True,
        bf16=False,
        activation_checkpointing=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    with warnings.catch_warnings():
        # TRL itself uses names that transformers gives up.
        warnings.simplefilter("ignore", FutureWarning)
        trainer = DPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(model_path),
            args=config,
            train_dataset=table,
            processing_class=AutoTokenizer.from_pretrained(model_path),
        )
        trainer.train()
    return [line for line in trainer.state.log_history if "loss" in line]


@pytest.mark.parametrize(
    ("world_size", "stage", "rows", "packed"),
    [(1, 0, 4, True), (1, 0, 4, False), (2, 3, 1, True), (2, 1, 2, False), (3, 2, 1, True), (3, 3, 2, True)],
)
def test_each_step_is_trls(
    pools: dict[int, RankPool],
    model_path: Path,
    trl: list[dict[str, float]],
    tmp_path: Path,
    world_size: int,
    stage: int,
    rows: int,
    packed: bool,
) -> None:
    runs = pools[world_size].run(train_on_engine, str(model_path), str(tmp_path), stage, rows, packed)
    for step, theirs in enumerate(trl):
        ours = runs[0].log[step]
        for name in METRICS:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-5), (step, name)
    assert runs[0].log[0]["loss"] == pytest.approx(np.log(2), rel=1e-6)
    assert runs[0].log[-1]["loss"] < runs[0].log[0]["loss"]


def test_what_the_start_said_is_kept_with_the_job(
    pools: dict[int, RankPool], model_path: Path, tmp_path: Path
) -> None:
    """A second attempt reads it, whatever model it has by then."""
    (first,) = pools[1].run(train_on_engine, str(model_path), str(tmp_path), 0, 4, True)
    (kept,) = tmp_path.iterdir()
    np.save(kept, first.start + 1.0, allow_pickle=False)
    second = pools[2].run(train_on_engine, str(model_path), str(tmp_path), 3, 1, True)
    assert all(np.array_equal(run.start, first.start + 1.0) for run in second)
