"""What a watched job shows: warnings and samples once, what is prepared, and the margin of preferences."""

from collections.abc import Iterator
from typing import Any

import pytest

from shardyard.cli import progress
from shardyard.cli.events import TEXT_LENGTH, event_line, shortened
from shardyard.cli.job_view import method_of, print_job, require_success
from shardyard.cli.progress import held, memory_line
from shardyard.client import Json, Shardyard, Update
from shardyard.errors import JobFailed


def a_job(status: str = "running", **more: Any) -> Json:
    step = {"step": 0, "total_steps": None, "tokens_per_second": None, "eta": None}
    return {
        "id": "ftjob-1",
        "status": status,
        "phase": "training" if status == "running" else None,
        "model": "tiny",
        "method": {"type": "supervised"},
        "resolved_config": {"training": {}},
        "attempts": 1,
        "created_at": 1,
        "finished_at": None,
        "fine_tuned_model": None,
        "result_files": [],
        "reason": None,
        "error": None,
        "warnings": [],
        **more,
        "progress": step | more.get("progress", {}),
    }


def an_event(number: int, message: str = "", level: str = "info", **data: Any) -> Json:
    return {"id": f"ftevent-{number}", "created_at": 1, "level": level, "message": message, "data": data}


def shown(updates: list[Update], monkeypatch: pytest.MonkeyPatch, quiet: bool = False) -> Json:
    """Watch a job that says these things."""
    with Shardyard("http://127.0.0.1:1", "key") as client:

        def watch(job_id: str) -> Iterator[Update]:
            yield from updates

        monkeypatch.setattr(client.jobs, "watch", watch)
        return progress.watch_job(client, "ftjob-1", quiet=quiet)


def test_files_that_are_prepared_are_counted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    counts = [{"done": 1200, "total": 5000, "param": "training_file"}, {"done": 7, "total": None}]
    updates = [
        Update(a_job(status, phase=phase, progress={"prepared": count}), [], [], [])
        for status, phase, count in zip(
            ("queued", "running"), ("preparing", "referencing"), counts, strict=True
        )
    ]
    trained = a_job(progress={"step": 3, "total_steps": 9, "prepared": counts[0]})
    shown([*updates, Update(trained, [], [], [])], monkeypatch)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines == [["preparing", "training_file", "1200/5000"], ["referencing", "7/?"], ["training", "3/9"]]


def test_warnings_come_once_and_on_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = [["one"], ["one", "two"], ["one", "two"]]
    updates = [Update(a_job(warnings=warnings), [], [], []) for warnings in said]
    job = shown(updates, monkeypatch)
    print_job(job, as_json=False, known=True)
    printed = capsys.readouterr()
    assert printed.err == "warning: one\nwarning: two\n"
    assert "one" not in printed.out
    shown(updates, monkeypatch, quiet=True)
    assert capsys.readouterr() == ("", "")


def test_samples_and_margins(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    metric = {"step": 1, "train_loss": 0.69, "valid_loss": None}
    sample = an_event(2, "sample", step=1, prompt="What is\n1 plus 1?", answer="2", reference="It is 2")
    events = [an_event(1, "step 1") | {"data": {"rewards/margins": 0.25}}, sample]
    job = a_job(progress={"step": 1, "total_steps": 1})
    shown([Update(job, [metric], [], events), Update(job, [], [], [])], monkeypatch)
    out = capsys.readouterr().out.splitlines()
    assert out == [
        "training      1/1  loss 0.6900  margin +0.2500",
        "sample at step 1",
        "  prompt    What is 1 plus 1?",
        "  answer    2",
        "  expected  It is 2",
    ]


def test_an_event_in_a_line() -> None:
    line = event_line(an_event(1, "2 lines were cut", level="warn"))
    assert line.endswith("  warn: 2 lines were cut")
    sample = event_line(an_event(1, "A sample", prompt="a", answer="b"))
    assert sample.splitlines()[1:] == ["  prompt    a", "  answer    b"]


def test_a_long_text_is_shortened_where_it_matters_least() -> None:
    text = "a" * TEXT_LENGTH
    assert shortened(text) == text
    assert shortened(text + "b") == "a" * (TEXT_LENGTH - 1) + "…"
    assert shortened(text + "b", keep="end") == "…" + "a" * (TEXT_LENGTH - 2) + "b"


def test_why_a_job_failed_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    error = {"code": "oom", "message": "A rank ran out of memory.", "param": None}
    job = a_job("failed", reason="oom", error=error)
    print_job(job, as_json=False, known=True)
    assert "oom" not in capsys.readouterr().out
    with pytest.raises(
        JobFailed, match=r"^ftjob-1 failed: A rank ran out of memory \(oom\)\. `shardyard jobs"
    ):
        require_success(job)
    with pytest.raises(JobFailed, match=r"^ftjob-1 cancelled: cancelled_by_user\. "):
        require_success(a_job("cancelled", reason="cancelled_by_user"))
    print_job(job, as_json=False)
    assert "A rank ran out of memory." in capsys.readouterr().out


def test_how_a_job_learns() -> None:
    assert method_of(a_job()) == "supervised"
    lora = {"r": 8, "quantization": "nf4", "merge": True}
    resolved = {"training": {"lora": lora}}
    job = a_job(method={"type": "dpo"}, resolved_config=resolved)
    assert method_of(job) == "dpo, LoRA of rank 8 on nf4, merged"
    lora |= {"quantization": None, "merge": False}
    assert method_of(job) == "dpo, LoRA of rank 8"


def test_memory_and_what_lies_elsewhere() -> None:
    amounts = {"parameters": {"device": 2**20}, "optimizer": {"device": 0, "disk": 2**30}}
    row = {
        "memory": {name: {"current": tiers, "peak": tiers} for name, tiers in amounts.items()},
        "resident_peak": 2**21,
    }
    line = memory_line(row)
    assert line == "parameters 1.0 MiB, optimizer 0 B, optimizer on disk 1.0 GiB, resident 2.0 MiB"
    assert held(row, "optimizer", "peak") == 0
