"""``shardyard files convert`` and ``preview``: what needs no server."""

import json
from pathlib import Path

import pytest

from tests.shardyard.conftest import CommandLine

RECORD = {"instruction": "Add 1 and 2.", "input": "", "output": "3", "source": "x"}


@pytest.fixture
def local(tmp_path: Path) -> CommandLine:
    """The command line with no server to ask."""
    return CommandLine(tmp_path / "no-data")


def test_convert(local: CommandLine, tmp_path: Path) -> None:
    source = tmp_path / "data.json"
    source.write_text(json.dumps([RECORD] * 3))
    done = local.run("files", "convert", str(source))
    assert (done.returncode, done.stderr) == (0, "")
    assert str(tmp_path / "data.jsonl") in done.stdout
    assert "chat, 3 examples, was a JSON array, Alpaca" in done.stdout
    assert "warning: the column 'source' is left out" in done.stdout
    first = (tmp_path / "data.jsonl").read_text().splitlines()[0]
    assert json.loads(first)["messages"][1] == {"role": "assistant", "content": "3"}

    again = local.run("files", "convert", str(source))
    assert (again.returncode, again.stdout) == (1, "")
    assert "exists already; give another target, or --force" in again.stderr
    forced = local.run("files", "convert", str(source), str(tmp_path / "data.jsonl"), "--force", "--json")
    told = json.loads(forced.stdout)
    assert (told["path"], told["format"], told["records"]) == (str(tmp_path / "data.jsonl"), "chat", 3)


def test_what_can_t_be_converted(local: CommandLine, tmp_path: Path) -> None:
    source = tmp_path / "data.json"
    source.write_text(json.dumps([RECORD, RECORD | {"output": 3}]))
    done = local.run("files", "convert", str(source))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "error: data.json: record 2 has a number in output where a string is expected. Nothing was written\n"
    )
    assert not (tmp_path / "data.jsonl").exists()


def test_preview(local: CommandLine, tmp_path: Path, tiny_model: Path) -> None:
    path = tmp_path / "-data.jsonl"
    path.write_text('{"prompt": "Add 1 and 2: ", "completion": "3"}\n' * 3)
    done = local.run("files", "preview", str(path), "--model", str(tiny_model), "--lines", "2", "--json")
    assert done.returncode == 0, done.stderr
    first, second = (json.loads(line) for line in done.stdout.splitlines())
    assert (first["line"], second["line"]) == (1, 2)
    pieces = first["sequences"][0]["pieces"]
    assert pieces[0] == {"text": "Add 1 and 2: ", "learnt": False}
    assert pieces[1]["learnt"]
    assert pieces[1]["text"].startswith("3")

    path.write_text('{"prompt": "a", "completions": "b"}\n')
    refused = local.run("files", "preview", str(path), "--model", str(tiny_model))
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr == (
        f"error: {path} can't be shown: line 1 has the unknown key 'completions': did you mean completion?\n"
    )
