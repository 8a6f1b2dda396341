"""House rules that a reader would otherwise have to remember."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("api", "bench", "jobs", "migrations", "shardyard", "worker", "zero_core")
LONGEST_FILE = 500
LONGEST_FUNCTION = 60


def python_files(*folders: str) -> Iterator[Path]:
    for folder in folders:
        yield from sorted((ROOT / folder).rglob("*.py"))


def calls(path: Path) -> Iterator[tuple[ast.Call, str]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            yield node, ast.unparse(node.func)


def test_nothing_unpickles_and_nothing_goes_through_a_shell() -> None:
    offences = []
    for path in python_files(*SOURCES):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
                offences += [
                    f"{path}:{node.lineno}" for name in names if name in ("pickle", "dill", "shelve")
                ]
        for call, name in calls(path):
            shell = any(k.arg == "shell" and ast.unparse(k.value) != "False" for k in call.keywords)
            if shell or name in ("torch.load", "os.system", "os.popen", "eval", "exec"):
                offences.append(f"{path}:{call.lineno} {name}")
    assert offences == []


def test_files_and_functions_stay_short() -> None:
    long = []
    for path in python_files(*SOURCES, "tests"):
        text = path.read_text()
        lines = text.count("\n")
        if lines > LONGEST_FILE:
            long.append(f"{path.relative_to(ROOT)}: {lines} lines")
        if path.is_relative_to(ROOT / "migrations" / "versions"):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > LONGEST_FUNCTION:
                    long.append(f"{path.relative_to(ROOT)}: {node.name} has {length} lines")
    assert long == []


def test_no_folder_or_file_is_named_after_nothing() -> None:
    vague = {"common", "utils", "util", "helpers", "core", "base", "misc"}
    found = [p for p in python_files(*SOURCES, "tests") if {p.stem, p.parent.name} & vague]
    assert found == []


def test_every_public_function_class_and_module_of_the_engine_says_what_it_is() -> None:
    """Modules always; classes and functions where the name and types alone would not tell."""
    assert [
        p
        for p in python_files("zero_core")
        if p.read_text() and not ast.get_docstring(ast.parse(p.read_text()))
    ] == []


@pytest.mark.parametrize(
    "module", ["api.main", "shardyard.cli.app", "jobs.submission", "zero_core.config.train"]
)
def test_processes_that_keep_records_load_no_torch(module: str, environment: dict[str, str]) -> None:
    program = (
        f"import {module}, sys; "
        "print([m for m in ('torch', 'transformers', 'safetensors') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.strip() == "[]"


def test_importing_the_engine_loads_no_transformers() -> None:
    program = (
        "import zero_core.engine, zero_core.checkpoints.checkpoint, sys; print('transformers' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "False"
