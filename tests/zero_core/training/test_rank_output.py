"""Lines of ranks that print into one log."""

import os
import subprocess
import sys

PROGRAM = """
from zero_core.training.rank_output import mark_output
mark_output()
import logging
logging.basicConfig(format="%(message)s")
print("one", "two")
print("three\\nfour", flush=True)
print("begun", end="", flush=True)
logging.warning("a warning")
raise ValueError("why")
"""


def printed(**environment: str) -> tuple[list[str], list[str]]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    return done.stdout.splitlines(), done.stderr.splitlines()


def test_every_line_names_its_rank() -> None:
    out, err = printed(RANK="1", WORLD_SIZE="2")
    assert out == [f"[rank 1] {line}" for line in ("one two", "three", "four", "begun")]
    assert err[:2] == ["[rank 1] a warning", "[rank 1] Traceback (most recent call last):"]
    assert all(line.startswith("[rank 1] ") for line in err)
    assert err[-1] == "[rank 1] ValueError: why"


def test_a_rank_alone_prints_as_ever() -> None:
    out, err = printed(RANK="0", WORLD_SIZE="1")
    assert out == ["one two", "three", "four", "begun"]
    assert err[-1] == "ValueError: why"
