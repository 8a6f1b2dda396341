"""Files become datasets: once, in their order, on any number of processes, and nothing goes in silence."""

import json
import os
import shutil
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.tiny_model import CHATML, byte_tokenizer, write_chat_file
from tests.zero_core.data.prepared import dataset_of, recipe, write_lines
from zero_core.config.train import Overflow
from zero_core.data import tokenizing_pool
from zero_core.data.cache import Cache
from zero_core.data.dataset import Dataset
from zero_core.data.examples import ChatExample, Example, TextExample
from zero_core.data.fitting import Fate
from zero_core.data.formats import InvalidFile
from zero_core.data.notes import Note
from zero_core.data.preparing import prepare
from zero_core.data.recipe import Fault, Prepared
from zero_core.data.tokenize import ExampleTokenizer, Tokenized, TokenizedExample
from zero_core.data.tokenizing_pool import cores_of_quota, processes_for, usable_cores
from zero_core.data.wire import decode_examples, encode_example, read_answer, write_answer
from zero_core.models.model_files import InvalidModel

LONG = [
    {"prompt": "ab", "completion": "c"},
    {"prompt": "ab", "completion": "cdefgh"},
    {"prompt": "abcdef", "completion": "g"},
    {"prompt": "", "completion": "abcdefgh"},
]
"""With the end 4, 9, 8 and 9 tokens."""


def plain(item: Prepared) -> list[Any]:
    sequences = [[(s.input_ids.tolist(), s.target_mask.tolist()) for s in sample] for sample in item.samples]
    return [item.line, item.fate, sequences, item.notes, item.fault, item.message]


def texts(data: Dataset) -> list[str]:
    return [byte_tokenizer().decode(sequence.input_ids) for (sequence,) in data]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lines that are tokenized in this process."""
    lines: list[int] = []
    real = ExampleTokenizer.__call__

    def counting(self: ExampleTokenizer, example: Example) -> Tokenized:
        lines.append(example.line)
        return real(self, example)

    monkeypatch.setattr(ExampleTokenizer, "__call__", counting)
    return lines


def test_examples_keep_the_order_of_the_file(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    file = write_chat_file(tmp_path / "f", 20)
    data = dataset_of(file, recipe(tmp_path / "model", 2048), min_examples=20)
    assert (len(data), data.sequences, data.warnings) == (20, 1, ())
    contents = [json.loads(line)["messages"] for line in file.read_text().splitlines()]
    for (example,), messages in zip(data, contents, strict=True):
        learnt = tokenizer.decode(example.input_ids[example.target_mask])
        assert learnt == messages[-1]["content"] + "<|im_end|>"
    assert data.lines is not None
    assert data.lines.tolist() == list(range(1, 21))


def test_processes_make_what_one_makes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Chunks of few examples, so that each of the two answers several times.
    monkeypatch.setattr(tokenizing_pool, "_CHUNK_EXAMPLES", 7)
    file = write_chat_file(tmp_path / "f", 60)
    file.write_text("\n" + file.read_text().replace("The sum is 1", "The sum is é🙂\\n 1"))
    how = recipe(tmp_path / "model", 75)
    caches = {processes: Cache(tmp_path / str(processes)) for processes in (1, 2)}
    keys = {
        processes: prepare(file, "training_file", how, cache, processes=processes)
        for processes, cache in caches.items()
    }
    assert keys[1] == keys[2]
    (alone, alone_meta), (together, together_meta) = (caches[n].read(keys[1]) for n in (1, 2))
    assert alone_meta == together_meta
    assert 0 < alone_meta["findings"]["tallies"]["cut"]["count"] < 60
    for name, array in alone.items():
        np.testing.assert_array_equal(together[name], array)


def test_a_model_that_a_process_cant_use_is_told_here(tmp_path: Path) -> None:
    how = recipe(tmp_path / "model", 64)
    (tmp_path / "model" / "tokenizer.json").write_text("{")
    file = write_chat_file(tmp_path / "f", 2)
    with pytest.raises(InvalidModel, match="its tokenizer can't be loaded"):
        dataset_of(file, how, processes=2)


def test_what_goes_between_processes_comes_out_as_it_went_in() -> None:
    one, other = (TokenizedExample(np.arange(n, dtype=np.int32), np.arange(n) % 2 == 1) for n in (3, 2))
    answer = [
        Prepared(3, Fate.WHOLE, ((one, other),), (Note.END_NOT_LEARNT,)),
        Prepared(4, Fate.SPLIT, ((other,), (one,))),
        Prepared(5, Fate.NO_TARGET, fault=Fault.TEMPLATE_REFUSED, message="é: no"),
    ]
    file = BytesIO()
    write_answer(file, answer)
    file.seek(0)
    got = read_answer(json.loads(file.readline()), file)
    assert [plain(item) for item in got] == [plain(item) for item in answer]
    example = ChatExample(7, ({"role": "user", "content": "é"},), (True,), ({"type": "function"},))
    request = b"[" + encode_example(example) + b"," + encode_example(TextExample(8, "x")) + b"]"
    assert list(decode_examples(request)) == [example, TextExample(8, "x")]
    file.seek(0)
    with pytest.raises(ValueError, match="breaks off"):
        read_answer(json.loads(file.readline()), BytesIO(b"1"))


def test_the_work_is_shared_out_by_size_and_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizing_pool, "usable_cores", lambda: 8)
    mib = 2**20
    assert [processes_for(size) for size in (0, 7 * mib, 8 * mib, 100 * mib)] == [1, 1, 2, 8]
    monkeypatch.undo()
    assert 1 <= usable_cores() <= len(os.sched_getaffinity(0))
    assert [cores_of_quota(text, 8) for text in ("max 100000", "250000 100000", "50000 100000")] == [8, 2, 1]


def test_a_file_is_tokenized_once(tmp_path: Path, counted: list[int]) -> None:
    file = write_chat_file(tmp_path / "f", 6)
    fresh = dataset_of(file, recipe(tmp_path / "model", 64))
    assert counted == [1, 2, 3, 4, 5, 6]
    # Another path and name, the same content: here from another run.
    again = dataset_of(Path(shutil.copy(file, tmp_path / "g")), recipe(tmp_path / "other model", 64))
    assert len(counted) == 6
    assert again.warnings == fresh.warnings != ()
    for name in ("input_ids", "target_mask", "offsets", "lines"):
        np.testing.assert_array_equal(getattr(again, name), getattr(fresh, name))
    (entry,) = (tmp_path / "cache").iterdir()
    (entry / "input_ids.npy").unlink()  # The first two have it mapped: not to be written to.
    (entry / "input_ids.npy").write_bytes(b"damaged")
    mended = dataset_of(file, recipe(tmp_path / "model", 64))
    assert len(counted) == 12
    np.testing.assert_array_equal(mended.input_ids, fresh.input_ids)


@pytest.mark.parametrize(
    "change",
    [
        {"max_length": 499},
        {"overflow": "drop"},
        {"train_on": "last"},
        {"chat_template": CHATML + " "},
        {"chat_template_kwargs": {"enable_thinking": False}},
        "file",
        "template",
        "eos",
    ],
)
def test_what_decides_the_tokens_decides_the_entry(
    tmp_path: Path, counted: list[int], change: dict[str, Any] | str
) -> None:
    file = write_chat_file(tmp_path / "f", 3)
    how = recipe(tmp_path / "model", 500)
    dataset_of(file, how)
    match change:
        case "file":
            write_chat_file(file, 3, seed=1)
        case "template":
            (how.model_dir / "chat_template.jinja").write_text(CHATML + "\n")
        case "eos":
            (how.model_dir / "generation_config.json").write_text('{"eos_token_id": [2]}')
        case dict():
            how = replace(how, **change)
    dataset_of(file, how)
    assert len(counted) == 6


@pytest.mark.parametrize(
    ("overflow", "expected", "warnings"),
    [
        (
            "truncate",
            ["abc#", "abcd", "abcd"],
            (
                "2 of 4 examples of training_file were cut at max_length 4 (lines 2, 4)",
                "1 of 4 examples of training_file has no token to learn within max_length 4 and was left out "
                "(line 3)",
            ),
        ),
        (
            "drop",
            ["abc#"],
            (
                "3 of 4 examples of training_file are longer than max_length 4 and were left out "
                "(lines 2, 3, 4)",
            ),
        ),
        (
            "split",
            # A prompt of at most half the length stands before each piece.
            ["abc#", "abcd", "abde", "abef", "abfg", "abgh", "abh#", "defg", "g#", "abcd", "defg", "gh#"],
            ("3 of 4 examples of training_file are longer than max_length 4 and were split (lines 2, 3, 4)",),
        ),
    ],
)
def test_long_examples_are_cut_left_out_or_split(
    tmp_path: Path, overflow: Overflow, expected: list[str], warnings: tuple[str, ...]
) -> None:
    data = dataset_of(
        write_lines(tmp_path / "f", *LONG), recipe(tmp_path / "model", 4, overflow=overflow), min_examples=1
    )
    assert [text.replace("<|im_end|>", "#") for text in texts(data)] == expected
    assert data.warnings == warnings
    learnt = sum(sequence.target_tokens for (sequence,) in data)
    # All of the completions and their ends, but for the first token of an empty prompt.
    assert learnt == {"truncate": 2 + 2 + 3, "drop": 2, "split": 2 + 7 + 2 + 8}[overflow]


def test_many_lines_are_counted_and_the_first_named(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "f", *[{"text": "a" * (2 + 10 * (n % 5 == 3))} for n in range(1, 51)])
    data = dataset_of(file, recipe(tmp_path / "model", 8), "validation_file")
    assert data.warnings == (
        "10 of 50 examples of validation_file were cut at max_length 8 (lines 3, 8, 13 and 7 more)",
    )
    assert (data.truncated, data.dropped) == (10, 0)


def test_conversations_are_not_split(tmp_path: Path) -> None:
    file = write_chat_file(tmp_path / "f", 3)
    with pytest.raises(InvalidFile, match=r"line 1 has \d+ tokens, more than max_length 8, and can't .*drop"):
        dataset_of(file, recipe(tmp_path / "model", 8, overflow="split"))
    assert len(dataset_of(file, recipe(tmp_path / "model", 500, overflow="split"))) == 3


def test_pairs_and_notes_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pair(self: ExampleTokenizer, example: Example) -> Tokenized:
        sequences = (
            TokenizedExample(np.full(n, example.line, dtype=np.int32), np.arange(n) > 0) for n in (2, 3)
        )
        return Tokenized(tuple(sequences), (Note.REASONING_LEFT_OUT,) if example.line > 1 else ())

    monkeypatch.setattr(ExampleTokenizer, "__call__", pair)
    data = dataset_of(write_chat_file(tmp_path / "f", 6), recipe(tmp_path / "model", 8))
    assert (len(data), data.sequences) == (6, 2)
    assert [[s.input_ids.tolist() for s in sample] for sample in data][4] == [[5, 5], [5, 5, 5]]
    assert data.warnings == (
        "In 5 of 6 examples of training_file the chat template leaves out reasoning of an answer that is "
        "learnt (lines 2, 3, 4 and 2 more)",
    )


def test_too_few_examples(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "f", *LONG)
    with pytest.raises(InvalidFile, match=r"0 usable examples; at least 1 are needed \(4 have no token"):
        dataset_of(write_lines(tmp_path / "g", *[LONG[2]] * 4), recipe(tmp_path / "model", 4))
    for _ in range(2):  # Also when the file is in the cache.
        with pytest.raises(InvalidFile, match=r"3 usable examples; at least 4 are needed \(1 have no token"):
            dataset_of(file, recipe(tmp_path / "model", 4), min_examples=4)
        dataset_of(file, recipe(tmp_path / "model", 4), min_examples=3)
    with pytest.raises(InvalidFile, match=r"\(0 have no .* max_length 4, 3 are longer and are left out\)"):
        dataset_of(file, recipe(tmp_path / "model", 4, overflow="drop"), min_examples=2)


def test_a_bad_file_is_refused_with_its_lines(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "f", {"text": "a"}, {"text": 1})
    with pytest.raises(InvalidFile, match="validation_file: line 2 has a number in text") as caught:
        dataset_of(file, recipe(tmp_path / "model", 16), "validation_file")
    assert caught.value.code == "invalid_validation_file"


def test_conversations_that_the_template_refuses_are_named(tmp_path: Path) -> None:
    strict = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}{{ messages }}"
    )
    file = write_lines(
        tmp_path / "f",
        *[{"messages": [{"role": role, "content": "x"}, {"role": "assistant", "content": "y"}]}
          for role in ("system", "system")],
    )  # fmt: skip
    with pytest.raises(InvalidFile, match=r"line 1 is refused by .*: no system.*line.* 2"):
        dataset_of(file, recipe(tmp_path / "model", 64, byte_tokenizer(strict)))


def test_an_ambiguous_template_is_the_models_fault(tmp_path: Path) -> None:
    with pytest.raises(InvalidModel, match=r"line 1 of the training_file: .*\); mark them .* generation"):
        dataset_of(
            write_chat_file(tmp_path / "f", 2), recipe(tmp_path / "model", 64, byte_tokenizer("nothing"))
        )


def test_progress_is_told_line_by_line_and_can_end_the_work(tmp_path: Path, counted: list[int]) -> None:
    file = tmp_path / "f"
    file.write_text("\n" + write_chat_file(file, 5).read_text() + "\n\n")
    seen: list[tuple[int, int | None]] = []
    how = recipe(tmp_path / "model", 64)

    def stop_at_3(done: int, total: int | None) -> None:
        seen.append((done, total))
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        dataset_of(file, how, on_progress=stop_at_3)
    assert seen == [(0, None), (2, 8), (3, 8)]
    assert counted == [2, 3]
    seen.clear()
    dataset_of(file, how, on_progress=lambda done, total: seen.append((done, total)))
    assert seen == [(0, None), (2, 8), (3, 8), (4, 8), (5, 8), (6, 8), (8, 8)]
