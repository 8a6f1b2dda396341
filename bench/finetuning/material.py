"""The model and the files of the comparison, and the examples as every engine trains them, in order."""

import inspect
import json
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.finetuning.task import Case
from shardyard.demo.docstrings import make_examples, write_examples
from shardyard.demo.model import convert
from zero_core.config.lora import LoraConfig
from zero_core.config.train import TrainConfig
from zero_core.data.batches import global_batch
from zero_core.data.cache import Cache
from zero_core.data.dataset import Dataset
from zero_core.data.preparing import open_dataset, prepare
from zero_core.data.recipe import Recipe

TRAIN_EXAMPLES = 224
VALIDATION_EXAMPLES = 32
IGNORED = -100


@dataclass(frozen=True)
class Material:
    model: Path
    training_file: Path
    validation_file: Path
    cache: Path

    def dataset(self, case: Case, path: Path) -> Dataset:
        recipe = Recipe.of(self.model, train_config(case), case.max_length)
        cache = Cache(self.cache)
        key = prepare(path, "training_file", recipe, cache, processes=1)
        return open_dataset(cache, key, "training_file", case.max_length)

    def in_order(self, case: Case) -> list[tuple[NDArray[np.int32], NDArray[np.bool_]]]:
        """Token ids and targets of every sample of every step."""
        dataset, train = self.dataset(case, self.training_file), train_config(case)
        batches = (global_batch(dataset, step, train) for step in range(case.steps))
        return [(item.sample[0].input_ids, item.sample[0].target_mask) for items in batches for item in items]


def train_config(case: Case) -> TrainConfig:
    """The plan that a user would take for speed: gradients sharded, as many tokens at once as there are."""
    return TrainConfig(
        max_steps=case.steps,
        train_batch_size=case.batch_size,
        per_device_max_tokens=max(case.max_length, 2048),
        max_length=case.max_length,
        learning_rate=case.learning_rate,
        lora=LoraConfig() if case.lora else None,
        zero_stage=2,
        precision="fp32",
        eval_on_start=False,
        eval_steps=case.steps,
        save_steps=case.steps,
        save_total_limit=1,
    )


def make_material(directory: Path, case: Case) -> Material:
    directory.mkdir(parents=True, exist_ok=True)
    kind = "long" if case.long_texts else "chat"
    found = Material(
        convert(directory / "models"),
        directory / f"{kind}-train.jsonl",
        directory / f"{kind}-valid.jsonl",
        directory / "cache",
    )
    if case.long_texts:
        texts = [json.dumps({"text": text}) + "\n" for text in _long_texts(case.batch_size * case.steps + 1)]
        found.training_file.write_text("".join(texts[:-1]))
        found.validation_file.write_text(texts[-1])
    else:
        train, validation = make_examples(TRAIN_EXAMPLES, VALIDATION_EXAMPLES)
        write_examples(found.training_file, train)
        write_examples(found.validation_file, validation)
    return found


def write_for_trl(material: Material, case: Case, path: Path) -> None:
    with path.open("w") as file:
        for ids, learnt in material.in_order(case):
            labels = np.where(learnt, ids, IGNORED).tolist()
            file.write(json.dumps({"input_ids": ids.tolist(), "labels": labels}) + "\n")


def _long_texts(count: int) -> Iterator[str]:
    """Source code of this Python's standard library, each much longer than an example may be."""
    source = inspect.getsource(inspect) + inspect.getsource(textwrap) + inspect.getsource(json)
    for number in range(count):
        # Each begins elsewhere.
        yield source[1000 * number : 1000 * number + 40_000]
