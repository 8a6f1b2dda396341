"""The demo's recipe against the real service, with a tiny model in place of the one it converts."""

import json
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console

from shardyard.client import Shardyard
from shardyard.demo import report, run
from shardyard.demo.docstrings import make_examples
from shardyard.demo.report import Outcome, Question
from shardyard.demo.run import require_fall, run_demo
from shardyard.errors import DemoFailed
from shardyard.stack.stack import Stack

TRAINING = run.TRAINING | {"max_length": 512, "learning_rate": 0.01}


@pytest.fixture
def _tiny(monkeypatch: pytest.MonkeyPatch, tiny_model: Path) -> None:
    monkeypatch.setattr(run, "NAME", "demo-model")
    monkeypatch.setattr(run, "convert", lambda models_dir: tiny_model)
    monkeypatch.setattr(run, "TRAIN_EXAMPLES", 32)
    monkeypatch.setattr(run, "VALIDATION_EXAMPLES", 10)
    monkeypatch.setattr(run, "TRAINING", TRAINING)


@pytest.mark.usefixtures("_tiny")
def test_the_demo_on_a_service_that_runs_already(
    stack: Stack, client: Shardyard, capsys: pytest.CaptureFixture[str]
) -> None:
    run_demo(stack.data_dir, stack_port(stack))
    shown = capsys.readouterr().out
    job = next(client.jobs.list(run.MARK))
    assert job["status"] == "succeeded"
    assert job["resources"] == {"gpus": 2}
    for part in (
        job["id"],
        job["fine_tuned_model"],
        "the documentation",
        "RANK 0",
        "RANK 1",
        "optimizer",
        str(stack.data_dir / "client.json"),
        f"{stack.url}/v1/fine_tuning/jobs",
    ):
        assert part in shown
    assert json.loads((stack.data_dir / "client.json").read_text())["api_key"] not in shown


@pytest.mark.usefixtures("_tiny")
def test_an_interrupted_demo_goes_on_with_its_job(stack: Stack, client: Shardyard) -> None:
    earlier = {job["id"] for job in client.jobs.list(run.MARK)}
    train, validation = run.make_examples(32, 10)
    client.models.add("demo-model", next(m["path"] for m in client.models.list() if m["id"] == "tiny"))
    waiting = run.submit(client, stack.data_dir, train, validation)
    run_demo(stack.data_dir, stack_port(stack))
    assert {job["id"] for job in client.jobs.list(run.MARK)} - earlier == {waiting["id"]}


def test_what_is_uploaded_already_is_not_uploaded_again(client: Shardyard, chat_file: Path) -> None:
    first = run.uploaded(client, chat_file)
    assert run.uploaded(client, chat_file) == first
    chat_file.write_text(chat_file.read_text() * 2)
    assert run.uploaded(client, chat_file) != first


def test_a_loss_that_did_not_fall_is_a_failure() -> None:
    require_fall(outcome(2.0, 1.9))
    for after in (2.0, 2.1, float("nan")):
        with pytest.raises(DemoFailed, match=r"did not fall: 2\.0000 before"):
            require_fall(outcome(2.0, after))


def test_what_models_say_is_shown_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(record=True, width=100)
    monkeypatch.setattr(report, "console", console)
    report.report(outcome(2.0, 1.0, answer="[red]not markup[/]"))
    assert "[red]not markup[/]" in console.export_text()


def test_the_shown_way_to_the_api_works(stack: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    report.show_the_way(stack.url, stack.data_dir)
    assign, curl = capsys.readouterr().out.splitlines()[-2:]
    # curl itself is not on every machine.
    done = subprocess.run(
        ["bash", "-c", f'{assign}; echo "$KEY"'], capture_output=True, text=True, check=True
    )
    authorization = {"Authorization": f"Bearer {done.stdout.strip()}"}
    assert httpx.get(curl.split()[-1], headers=authorization).json()["object"] == "list"


def test_answers_are_those_before_training_and_at_its_end() -> None:
    asked, other = make_examples(4, 2)[1]
    events = [
        {"data": {"step": step, "prompt": f"user {asked.question} assistant", "answer": f"at {step}"}}
        for step in (28, 14, 0)
    ]
    (found,) = run.answered([{"data": {"step": 3}}, *events, {"data": None}], [other, asked])
    assert found == Question(asked.question, asked.answer, "at 0", "at 28")


def outcome(before: float, after: float, answer: str = "It adds.") -> Outcome:
    usage = {"current": {"device": 8}, "peak": {"device": 16}}
    memory: list[dict[str, Any]] = [
        {"rank": rank, "memory": {"parameters": usage}, "resident": 2**10, "resident_peak": 2**20}
        for rank in (0, 1)
    ]
    return Outcome(
        job={"id": "ftjob-1", "plan": None, "fine_tuned_model": "ft:m"},
        loss_before=before,
        loss_after=after,
        memory=memory,
        questions=[Question("What does it do?", "It adds numbers.", "I don't know.", answer)],
        again=answer,
        checkpoint=Path("step-1"),
        export=Path("export"),
    )


def stack_port(stack: Stack) -> int:
    return int(stack.url.rpartition(":")[2])
