import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.tiny_model import byte_tokenizer, write_chat_file
from zero_core.data.dataset import Dataset
from zero_core.data.formats import InvalidFile
from zero_core.models.model_files import InvalidModel


def write(path: Path, *values: Any) -> Path:
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path


def test_examples_keep_the_order_of_the_file(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    dataset = Dataset.from_file(write_chat_file(tmp_path / "f", 20), tokenizer, 2048, 20)
    assert (len(dataset), dataset.truncated, dataset.dropped) == (20, 0, 0)
    contents = [json.loads(line)["messages"] for line in (tmp_path / "f").read_text().splitlines()]
    for example, messages in zip(dataset, contents, strict=True):
        assert (
            tokenizer.decode(example.input_ids[example.target_mask]) == messages[-1]["content"] + "<|im_end|>"
        )
    assert dataset.input_ids.dtype == np.int32
    with pytest.raises(IndexError):
        dataset[20]


def test_long_examples_are_cut_and_those_without_a_target_left_out(tmp_path: Path) -> None:
    file = write(
        tmp_path / "f",
        {"prompt": "ab", "completion": "c"},
        {"prompt": "ab", "completion": "cdefgh"},
        {"prompt": "abcdef", "completion": "g"},
        {"prompt": "", "completion": "abcdefgh"},
    )
    dataset = Dataset.from_file(file, byte_tokenizer(), max_length=4)
    assert [len(example) for example in dataset] == [4, 4, 4]
    assert [example.target_tokens for example in dataset] == [2, 2, 3]
    assert (dataset.truncated, dataset.dropped) == (2, 1)
    # What is left of the last is one token to learn, which nothing predicts.
    with pytest.raises(InvalidFile, match=r"0 usable examples; at least 1 are needed \(4 have no token"):
        Dataset.from_file(file, byte_tokenizer(), max_length=1)
    with pytest.raises(InvalidFile, match=r"3 usable examples; at least 4 are needed \(1 have no token"):
        Dataset.from_file(file, byte_tokenizer(), max_length=4, min_examples=4)


def test_a_bad_file_is_refused_with_its_lines(tmp_path: Path) -> None:
    file = write(tmp_path / "f", {"text": "a"}, {"text": 1})
    with pytest.raises(InvalidFile, match="validation_file: line 2 has a number in text") as caught:
        Dataset.from_file(file, byte_tokenizer(), 16, 1, "validation_file")
    assert caught.value.code == "invalid_validation_file"


def test_conversations_that_the_template_refuses_are_named(tmp_path: Path) -> None:
    strict = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}{{ messages }}"
    )
    file = write(
        tmp_path / "f",
        *[{"messages": [{"role": role, "content": "x"}, {"role": "assistant", "content": "y"}]}
          for role in ("system", "system")],
    )  # fmt: skip
    with pytest.raises(InvalidFile, match=r"line 1 is refused by .*: no system \(also line 2\)"):
        Dataset.from_file(file, byte_tokenizer(strict), 64)


def test_an_ambiguous_template_is_the_models_fault(tmp_path: Path) -> None:
    file = write_chat_file(tmp_path / "f", 2)
    with pytest.raises(
        InvalidModel,
        match=r"line 1 of the training_file: .* by a loop over the messages\); mark them .* generation",
    ):
        Dataset.from_file(file, byte_tokenizer("nothing"), 64)
