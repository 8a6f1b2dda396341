import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny_model import write_tiny_model
from zero_core.models.generate import main


def generate(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "zero_core.models.generate", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("generate") / "model"))


def test_answers_are_json_in_the_order_of_the_prompts_and_nothing_else_is_printed(model: str) -> None:
    asked = ["--prompt", "é?", "--prompt", "two"]
    done = generate(model, "--max-new-tokens", "4", *asked)
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout)
    assert [item["prompt"] for item in answers] == ["é?", "two"]
    assert all(isinstance(item["answer"], str) for item in answers)
    assert done.stderr == ""


def test_check_only_loads(model: str) -> None:
    checked = generate(model, "--check")
    assert (checked.returncode, json.loads(checked.stdout)) == (0, [])


def test_a_bad_model_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["generate", str(tmp_path), "--check"])
    assert main() == 2
    assert capsys.readouterr().err == (
        f"error: {tmp_path / 'config.json'} is missing: a Hugging Face model directory has one\n"
    )


@pytest.mark.parametrize("arguments", [[], ["--prompt", "x", "--max-new-tokens", "0"]])
def test_a_call_without_sense_is_a_usage_error(
    model: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["generate", model, *arguments])
    with pytest.raises(SystemExit, match="2"):
        main()
