"""The demo's data: real, repeatable, and honest about what was held out."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from shardyard.demo.docstrings import clean, make_examples, write_examples
from zero_core.data.formats import validate_file

TRAIN, VALIDATION = make_examples(224, 32)


def test_another_process_makes_the_same_examples() -> None:
    program = (
        "from shardyard.demo.docstrings import make_examples; "
        "print(*(e.line() for split in make_examples(224, 32) for e in split), sep='\\n')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONHASHSEED": "1", "PYTHONUTF8": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == [example.line() for example in [*TRAIN, *VALIDATION]]


def test_no_function_question_or_answer_is_in_both_splits() -> None:
    assert (len(TRAIN), len(VALIDATION)) == (224, 32)
    for field in ("name", "question", "answer"):
        train = {getattr(example, field) for example in TRAIN}
        validation = {getattr(example, field) for example in VALIDATION}
        assert len(train) == 224
        assert len(validation) == 32
        assert train.isdisjoint(validation)


def test_a_larger_training_split_leaves_the_validation_split_alone() -> None:
    larger, validation = make_examples(300, 32)
    assert validation == VALIDATION
    assert larger[:224] == TRAIN


def test_every_answer_reads_as_one() -> None:
    for example in [*TRAIN, *VALIDATION]:
        assert 40 <= len(example.answer) <= 321
        assert example.answer[-1] in ".!?"
        assert "\n" not in example.answer
        assert ">>>" not in example.answer
        assert f"`{example.name}(" in example.question


def test_the_server_takes_the_file(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    write_examples(path, TRAIN)
    assert validate_file(path).error_count == 0
    assert json.loads(path.read_text().splitlines()[0])["messages"][0]["role"] == "user"


def test_more_than_the_library_has_is_refused() -> None:
    with pytest.raises(ValueError, match="examples are asked for"):
        make_examples(100_000, 32)


@pytest.mark.parametrize(
    ("docstring", "answer"),
    [
        (
            "Return the number of\n    times it occurs in the list.\n\n    More about it.",
            "Return the number of times it occurs in the list.",
        ),
        (
            "S.swap(x) -> str\n\nreturn a copy of S with its case swapped",
            "Return a copy of S with its case swapped.",
        ),
        (
            "pause(seconds)\n\nDelay execution for a number of seconds.",
            "Delay execution for a number of seconds.",
        ),
        ("Too short.", None),
        ("", None),
        (">>> example_of_a_call(with_arguments, and_more_of_them)", None),
        ("The following table lists what each of the letters means:", None),
        ("x" * 400, None),
    ],
)
def test_an_answer_is_the_first_paragraph_as_prose(docstring: str, answer: str | None) -> None:
    assert clean(docstring) == answer
