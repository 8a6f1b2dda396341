"""A file prepared for a test, with the tokenizer of a test in a directory as a model has it."""

import json
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from tests.tiny_model import byte_tokenizer
from zero_core.data.cache import Cache
from zero_core.data.dataset import Dataset
from zero_core.data.formats import Param
from zero_core.data.preparing import open_dataset, prepare
from zero_core.data.recipe import Recipe


def write_lines(path: Path, *values: Any) -> Path:
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path


def recipe(
    directory: Path, max_length: int, tokenizer: PreTrainedTokenizerFast | None = None, **settings: Any
) -> Recipe:
    """``directory`` holds the tokenizer from now on."""
    (tokenizer or byte_tokenizer()).save_pretrained(directory)
    return Recipe(directory, max_length, **settings)


def dataset_of(file: Path, how: Recipe, param: Param = "training_file", **options: Any) -> Dataset:
    cache = Cache(file.parent / "cache")
    return open_dataset(cache, prepare(file, param, how, cache, **options), param, how.max_length)
