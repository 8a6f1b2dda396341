import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from bench.launch import RunFailed, last_word, run_ranks
from bench.task import Case, Task

TINY = Case("tiny", "fp32", ranks=2, steps=4, sequence_length=16, rows=1)


def test_a_rank_that_raises_ends_the_run_with_its_own_words() -> None:
    """Rank 1 waits for nobody: both fail alike, and the first one seen is named."""
    with pytest.raises(RunFailed, match=r"^rank [01]: KeyError: 'no-such-engine'$"):
        run_ranks(Task(TINY, "no-such-engine"), timeout_seconds=60)


def test_a_run_that_takes_too_long_is_ended() -> None:
    with pytest.raises(RunFailed, match=r"^timed out after 0.2 s$"):
        run_ranks(Task(TINY, "ddp"), timeout_seconds=0.2)


def test_a_case_without_a_step_to_measure_is_refused() -> None:
    with pytest.raises(ValueError, match="steps: 2 leaves none to measure"):
        dataclasses.replace(TINY, steps=2)


def test_a_rank_that_aborts_says_where(tmp_path: Path) -> None:
    log = tmp_path / "rank.log"
    with log.open("wb") as output:
        code = subprocess.call(
            [sys.executable, "-X", "faulthandler", "-c", "import os; os.abort()"], stderr=output
        )
    assert (
        last_word(log.read_text(), code)
        == 'signal 6: Fatal Python error: Aborted: File "<string>", line 1 in <module>'
    )
