import json
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select
from sqlalchemy.orm import Session, sessionmaker

from jobs import attempts, runs, shipping
from jobs.claims import claim
from jobs.errors import Fenced
from jobs.recording import LONGEST_WARNING, MOST_WARNINGS
from jobs.settings import Settings
from jobs.tables import Checkpoint, Event, Job, Metric, Telemetry
from tests.worker.records import BOOT, HOST, add_host, add_job

Sessions = sessionmaker[Session]

START = {
    "kind": "start",
    "time": 1.0,
    "total_steps": 10,
    "step": 0,
    "resumed_from": None,
    "world_size": 1,
    "examples": 20,
    "parameters": 1000,
    "model_state_bytes": {"parameters": 4000, "gradients": 4000, "optimizer": 8000},
    "device": "cpu",
}
MEMORY = {"parameters": {"current": {"cpu": 4000}, "peak": {"cpu": 4000}}}


def metrics(step: int, loss: float | None = 1.5) -> dict[str, Any]:
    return {
        "kind": "metrics",
        "time": 2.0,
        "step": step,
        "train_loss": loss,
        "train_accuracy": 0.5,
        "learning_rate": 1e-5,
        "grad_norm": 1.0,
        "tokens": 10,
        "trained_tokens": 10 * step,
        "tokens_per_second": 99.5,
        "seconds": 0.1,
        "elements_sent": 2000,
        "skipped": False,
    }


def checkpoint(step: int, path: str) -> dict[str, Any]:
    return {
        "kind": "checkpoint",
        "time": 3.0,
        "step": step,
        "path": path,
        "manifest_sha256": "ab" * 32,
        "bytes": 5000,
        "train_loss": 1.5,
        "train_accuracy": 0.5,
        "valid_loss": None,
        "valid_accuracy": None,
    }


def telemetry(step: int) -> dict[str, Any]:
    return {"step": step, "time": 2.0, "memory": MEMORY, "resident": 10**8, "resident_peak": 2 * 10**8}


def append(path: Path, *lines: dict[str, Any] | bytes) -> None:
    with path.open("ab") as file:
        for line in lines:
            file.write(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n")


def ship_all(sessions: Sessions, directory: Path, epoch: int = 1) -> int:
    """Rounds until nothing is left; bounded, so that a line that is never passed fails the test."""
    for rounds in range(20):
        with sessions.begin() as session:
            offsets = shipping.offsets(session, "ftjob-1", epoch)
        chunks = shipping.read(directory, offsets)
        if not chunks:
            return rounds
        with sessions.begin() as session:
            shipping.ship(session, "ftjob-1", epoch, chunks)
    raise AssertionError("shipping is stuck")


@pytest.fixture
def directory(sessions: Sessions, settings: Settings, tmp_path: Path) -> Path:
    with sessions.begin() as session:
        add_host(session, 2)
        add_job(session, plan={"parameters_bytes": 4000})
        assert claim(session, settings, HOST, BOOT) is not None
    return tmp_path


def test_lines_become_rows(sessions: Sessions, directory: Path) -> None:
    append(
        directory / "events.jsonl",
        START,
        {"kind": "phase", "time": 1.0, "phase": "training"},
        {"kind": "evaluation", "time": 1.5, "step": 0, "valid_loss": 2.0, "valid_accuracy": 0.1},
        metrics(1),
        metrics(2, loss=None),
        checkpoint(2, "/data/step-2"),
        {"kind": "message", "time": 4.0, "level": "warn", "message": "3 examples were cut"},
        {"kind": "exported", "time": 5.0, "path": "/data/model", "bytes": 7},
    )
    append(directory / "rank-0.jsonl", telemetry(1), telemetry(2))
    append(directory / "rank-10.jsonl", telemetry(1))
    ship_all(sessions, directory)
    with sessions.begin() as session:
        job = session.get_one(Job, "ftjob-1")
        assert (job.state, job.phase, job.step, job.total_steps) == ("running", "training", 2, 10)
        assert (job.trained_tokens, job.tokens_per_second) == (20, 99.5)
        assert job.started_at is not None
        assert job.plan is not None
        assert job.plan["parameters_bytes"] == 4000
        assert job.plan["model_state_bytes"] == START["model_state_bytes"]
        rows = session.execute(
            select(Metric.step, Metric.train_loss, Metric.valid_loss).order_by(Metric.step)
        )
        assert [tuple(row) for row in rows] == [(0, None, 2.0), (1, 1.5, None), (2, None, None)]
        rows = session.execute(
            select(Telemetry.rank, Telemetry.step).order_by(Telemetry.rank, Telemetry.step)
        )
        assert [tuple(row) for row in rows] == [(0, 1), (0, 2), (10, 1)]
        assert session.scalars(select(Telemetry).limit(1)).one().memory == MEMORY
        made = session.scalars(select(Checkpoint)).one()
        assert (made.step, made.epoch, made.path, made.bytes) == (2, 1, "/data/step-2", 5000)
        said = [(event.type, event.level, event.message) for event in session.scalars(select(Event))]
        assert ("metrics", "info", "Step 1/10: training loss=1.5000") in said
        assert ("message", "warn", "3 examples were cut") in said


def events(sessions: Sessions) -> list[Event]:
    with sessions.begin() as session:
        return list(session.scalars(select(Event).order_by(Event.id)))


def test_what_a_method_measures_reaches_events(sessions: Sessions, directory: Path) -> None:
    rewards = {"rewards/margins": 0.25, "rewards/chosen": None, "occupancy": 1}
    unusable = {"said": "x", "flag": True, "NaN": float("nan"), "huge": 2**80, "a\0b": 1.0, "k" * 65: 1.0}
    valid = {"kind": "evaluation", "time": 2.5, "step": 1, "valid_loss": 1.0, "valid_accuracy": 0.5}
    append(
        directory / "events.jsonl",
        START,
        metrics(1) | rewards | unusable,
        valid | {"valid_rewards/margins": 0.5},
        # Further numbers never replace those that the service makes itself.
        metrics(2) | {"train_mean_token_accuracy": 9.0},
        metrics(3) | {f"number-{i}": i for i in range(100)},
    )
    ship_all(sessions, directory)
    _, first, validation, second, third = events(sessions)
    assert first.data == rewards | {
        "step": 1,
        "train_loss": 1.5,
        "train_mean_token_accuracy": 0.5,
        "learning_rate": 1e-5,
        "grad_norm": 1.0,
        "tokens_per_second": 99.5,
    }
    assert validation.data["valid_rewards/margins"] == 0.5
    assert second.data["train_mean_token_accuracy"] == 0.5
    assert len(third.data) < 80


def test_samples_are_events_with_what_was_said(sessions: Sessions, directory: Path) -> None:
    said = {"step": 2, "prompt": "two and two", "answer": "five\n", "reference": "four"}
    append(directory / "events.jsonl", START, {"kind": "sample", "time": 2.0, **said})
    ship_all(sessions, directory)
    sample = events(sessions)[-1]
    assert (sample.type, sample.level, sample.data) == ("message", "info", said)
    assert "2/10" in sample.message


def test_the_phases_before_the_first_step_are_progress(sessions: Sessions, directory: Path) -> None:
    def job() -> Job:
        ship_all(sessions, directory)
        with sessions.begin() as session:
            return session.get_one(Job, "ftjob-1")

    line = {"kind": "preparing", "time": 1.0, "param": "training_file", "done": 3, "total": None}
    assert job().state == "starting"
    append(directory / "events.jsonl", {"kind": "phase", "time": 1.0, "phase": "preparing"}, line)
    assert (job().state, job().phase) == ("running", "preparing")
    assert job().prepared == {"param": "training_file", "done": 3, "total": None}
    append(directory / "events.jsonl", {"kind": "phase", "time": 1.0, "phase": "referencing"})
    assert job().phase == "referencing"
    # Another attempt begins anew.
    append(directory / "events.jsonl", {"kind": "phase", "time": 1.0, "phase": "preparing"})
    assert job().prepared is None


def test_what_is_warned_of_is_among_the_jobs_warnings_once_and_not_without_end(
    sessions: Sessions, directory: Path
) -> None:
    def warning(text: str) -> dict[str, Any]:
        return {"kind": "message", "time": 1.0, "level": "warn", "message": text}

    info = warning("a note") | {"level": "info"}
    append(
        directory / "events.jsonl", warning("8 are gone"), info, warning("x" * 5000), warning("8 are gone")
    )
    ship_all(sessions, directory)
    with sessions.begin() as session:
        assert session.get_one(Job, "ftjob-1").warnings == ["8 are gone", "x" * LONGEST_WARNING]
    append(directory / "events.jsonl", *(warning(f"line {i}") for i in range(2 * MOST_WARNINGS)))
    ship_all(sessions, directory)
    with sessions.begin() as session:
        warnings = session.get_one(Job, "ftjob-1").warnings
    assert len(warnings) == MOST_WARNINGS
    assert warnings[-1] == f"line {MOST_WARNINGS - 3}"
    assert len([event for event in events(sessions) if event.level == "warn"]) == 3 + 2 * MOST_WARNINGS


def test_a_torn_line_waits_for_its_end(sessions: Sessions, directory: Path) -> None:
    whole = json.dumps(metrics(1)).encode()
    append(directory / "events.jsonl", START, whole[:40])
    ship_all(sessions, directory)
    with sessions.begin() as session:
        assert session.scalar(select(func.count()).select_from(Metric)) == 0
    append(directory / "events.jsonl", whole[40:] + b"\n")
    ship_all(sessions, directory)
    with sessions.begin() as session:
        assert session.scalar(select(Metric.step)) == 1
        warnings = select(func.count()).select_from(Event).where(Event.level == "warn")
        assert session.scalar(warnings) == 0


def test_a_crash_before_the_commit_ships_each_line_once(sessions: Sessions, directory: Path) -> None:
    append(directory / "events.jsonl", START, metrics(1), metrics(2))
    chunks = shipping.read(directory, {})

    def crash_in_the_middle() -> None:
        with sessions.begin() as session:
            shipping.ship(session, "ftjob-1", 1, chunks)
            raise ConnectionError

    with pytest.raises(ConnectionError):
        crash_in_the_middle()
    with sessions.begin() as session:
        assert session.scalar(select(func.count()).select_from(Event)) == 0
        assert shipping.offsets(session, "ftjob-1", 1) == {}
    ship_all(sessions, directory)
    with sessions.begin() as session:
        # The commit went through and its answer was lost: the same chunks come once more.
        shipping.ship(session, "ftjob-1", 1, chunks)
    with sessions.begin() as session:
        count = select(func.count()).select_from(Event).where(Event.type == "metrics")
        assert session.scalar(count) == 2


@pytest.mark.parametrize(
    "bad",
    [
        b"not json\n",
        b"\n",
        b'{"kind": "surprise", "time": 1}\n',
        b'["kind"]\n',
        json.dumps(metrics(2) | {"step": "two"}).encode() + b"\n",
        json.dumps(metrics(2) | {"step": 2**40}).encode() + b"\n",
        json.dumps(metrics(2) | {"train_loss": float("nan")}).encode() + b"\n",
        json.dumps(metrics(2) | {"time": 1e300}).encode() + b"\n",
        b'{"kind": "message", "time": 1, "level": "info", "message": "\xff"}\n',
        b'{"kind": "message", "time": 1, "level": "info", "message": "\\ud800"}\n',
        b"x" * (3 * shipping.CHUNK_BYTES) + b"\n",
    ],
    ids=range(11),
)
def test_a_malformed_line_is_skipped_with_a_warning(sessions: Sessions, directory: Path, bad: bytes) -> None:
    append(directory / "events.jsonl", START, metrics(1), bad, metrics(3))
    append(directory / "rank-0.jsonl", telemetry(1), bad, telemetry(3))
    ship_all(sessions, directory)
    with sessions.begin() as session:
        assert list(session.scalars(select(Metric.step).order_by(Metric.step))) == [1, 3]
        assert list(session.scalars(select(Telemetry.step).order_by(Telemetry.step))) == [1, 3]
        warnings = list(session.scalars(select(Event.message).where(Event.level == "warn")))
        assert any("events.jsonl" in warning for warning in warnings)
        assert any("rank-0.jsonl" in warning for warning in warnings)


def test_a_nul_character_does_not_stop_shipping(sessions: Sessions, directory: Path) -> None:
    line = {"kind": "message", "time": 1.0, "level": "info", "message": "a\0b"}
    append(directory / "events.jsonl", START, line)
    ship_all(sessions, directory)
    with sessions.begin() as session:
        assert "a\ufffdb" in session.scalars(select(Event.message)).all()


def test_much_is_shipped_in_bounded_transactions(sessions: Sessions, directory: Path) -> None:
    lines = 4 * shipping.CHUNK_BYTES // len(json.dumps(telemetry(100)))
    append(directory / "rank-0.jsonl", *(telemetry(step) for step in range(lines)))
    assert ship_all(sessions, directory) >= 4
    with sessions.begin() as session:
        assert session.scalar(select(func.count()).select_from(Telemetry)) == lines


def test_a_later_attempt_replaces_the_steps_that_it_repeats(
    sessions: Sessions, settings: Settings, directory: Path, tmp_path: Path
) -> None:
    append(
        directory / "events.jsonl", START, metrics(1, 1.0), checkpoint(1, "/data/a1/step-1"), metrics(2, 2.0)
    )
    append(directory / "rank-0.jsonl", telemetry(2))
    ship_all(sessions, directory)
    with sessions.begin() as session:
        job = attempts.hold(session, "ftjob-1", 1)
        attempts.finish(session, settings, job, attempts.Ending(attempts.State.RETRY_WAIT))
        job.state = "queued"
        job.run_at = func.now()
    with sessions.begin() as session:
        assert claim(session, settings, HOST, BOOT) is not None
        job = session.get_one(Job, "ftjob-1")
        assert runs.inputs(session, settings, job)["resume"] == ["/data/a1/step-1"]
    second = tmp_path / "a2"
    second.mkdir()
    resumed = START | {"step": 1, "resumed_from": "/data/a1/step-1"}
    append(
        second / "events.jsonl",
        resumed,
        metrics(2, 2.5),
        checkpoint(2, "/data/a2/step-2"),
        {"kind": "pruned", "time": 3.0, "path": "/data/a1/step-1"},
    )
    append(second / "rank-0.jsonl", telemetry(2))
    ship_all(sessions, second, epoch=2)
    append(directory / "events.jsonl", metrics(3, 9.0))
    with pytest.raises(Fenced):
        ship_all(sessions, directory, epoch=1)
    with sessions.begin() as session:
        rows = session.execute(select(Metric.step, Metric.epoch, Metric.train_loss).order_by(Metric.step))
        assert [tuple(row) for row in rows] == [(1, 1, 1.0), (2, 2, 2.5)]
        assert session.scalar(select(Telemetry.epoch)) == 2
        job = session.get_one(Job, "ftjob-1")
        assert attempts.alive(session, job).resumed_from_step == 1
        assert runs.checkpoint_paths(session, job) == ["/data/a2/step-2"]
