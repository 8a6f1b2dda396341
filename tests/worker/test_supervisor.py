"""Jobs over scripted ranks: real claims, supervisors, torchrun, signals, and a real database."""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import column, func, select, table, text
from sqlalchemy.orm import Session, sessionmaker

from jobs import attempts
from jobs.settings import Settings
from jobs.tables import Attempt, Checkpoint, Event, Gpu, Job, Metric, Model, Telemetry
from tests.worker.records import add_job
from tests.worker.waiting import wait_until
from worker import sweep
from worker.host import this_host
from worker.sweeper import Sweeper

Sessions = sessionmaker[Session]
JOB = "ftjob-supervised"
"""Of this file alone: sweeps find processes by job id all over the machine, where other tests run too."""
STEPS = 20


class Yard:
    """One worker host without its message consumer: the test makes the passes of its sweep."""

    def __init__(self, settings: Settings, sessions: Sessions) -> None:
        self.settings = settings
        self.sessions = sessions
        self.sweeper = Sweeper(
            settings, sessions, this_host(settings), supervisor_module="tests.worker.scripted_supervisor"
        )

    def submit(self, *, gpus: int = 2, steps: int = STEPS, **script: Any) -> None:
        with self.sessions.begin() as session:
            job = add_job(session, JOB, gpus=gpus)
            job.spec = job.spec | {"training": {"max_steps": steps, "script": script}}

    def job(self) -> Job:
        with self.sessions.begin() as session:
            return session.get_one(Job, JOB)

    def want(self, desired: str) -> None:
        with self.sessions.begin() as session:
            session.get_one(Job, JOB, with_for_update=True).desired = desired

    def wait_for(self, state: str, seconds: float = 60) -> Job:
        def reached() -> bool:
            self.sweeper.sweep()
            return self.job().state == state

        wait_until(reached, f"the job is {state}", seconds)
        return self.job()

    def wait_for_step(self, step: int) -> None:
        def reached() -> bool:
            self.sweeper.sweep()
            return self.job().step >= step

        wait_until(reached, f"step {step}")

    def processes(self, epoch: int = 1) -> list[sweep.ProcessIdentity]:
        return sweep.processes(sweep.attempt_tag(JOB, epoch))

    def ranks(self, epoch: int = 1) -> list[sweep.ProcessIdentity]:
        return sweep.ranks(sweep.attempt_tag(JOB, epoch))

    def supervisor(self, epoch: int = 1) -> sweep.ProcessIdentity:
        with self.sessions.begin() as session:
            attempt = session.scalars(select(Attempt).where(Attempt.epoch == epoch)).one()
            assert attempt.pid is not None
            assert attempt.pid_start is not None
            return sweep.ProcessIdentity(attempt.pid, attempt.pid_start)

    def log(self, epoch: int = 1) -> str:
        return (self.settings.attempt_dir(JOB, epoch) / "log.txt").read_text()

    def attempts(self) -> list[tuple[int, str | None]]:
        with self.sessions.begin() as session:
            return [(a.epoch, a.reason) for a in session.scalars(select(Attempt).order_by(Attempt.epoch))]


@pytest.fixture
def yard(
    settings: Settings, sessions: Sessions, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Yard]:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SHARDYARD_ADMIN_KEY", "sk-sy-secret")
    yard = Yard(settings, sessions)
    yield yard
    for epoch, _ in yard.attempts():
        assert sweep.kill_all(sweep.attempt_tag(JOB, epoch), 10)


def expect_whole_run(yard: Yard) -> None:
    """Every step of every rank once, in order, whatever happened meanwhile."""
    with yard.sessions.begin() as session:
        rows = session.execute(select(Metric.step, Metric.train_loss).order_by(Metric.step))
        assert [tuple(row) for row in rows] == [(step, 1 / step) for step in range(1, STEPS + 1)]
        rows = session.execute(select(Telemetry.step, Telemetry.rank))
        assert {tuple(row) for row in rows} == {(s, r) for s in range(1, STEPS + 1) for r in (0, 1)}
        assert session.scalars(select(Gpu).where(Gpu.attempt_id.is_not(None))).all() == []
    for epoch, _ in yard.attempts():
        wait_until(lambda epoch=epoch: not yard.processes(epoch), "no process is left", 10)


def test_a_job_runs_to_its_end(yard: Yard) -> None:
    yard.submit()
    job = yard.wait_for("succeeded")
    expect_whole_run(yard)
    assert (job.step, job.total_steps, job.trained_tokens, job.attempts) == (STEPS, STEPS, 10 * STEPS, 1)
    assert job.started_at is not None
    assert job.finished_at is not None
    assert job.phase is None
    with yard.sessions.begin() as session:
        model = session.get_one(Model, job.fine_tuned_model)
        assert Path(model.path, "config.json").exists()
        assert list(session.scalars(select(Checkpoint.step).order_by(Checkpoint.step))) == [5, 10, 15, 20]
        said = list(session.scalars(select(Event.message).order_by(Event.id)))
    assert said[0] == "Fine-tuning job started"
    assert said[-1] == "The job has successfully completed"


def test_files_are_prepared_in_sight_and_an_adapter_comes_out(yard: Yard) -> None:
    yard.submit(prepare=True, adapter=True, gpus=1, steps=1)

    def lines() -> int:
        yard.sweeper.sweep()
        return (yard.job().prepared or {}).get("done", 0)

    wait_until(lambda: lines() > 2, "the job shows how many lines are prepared")
    job = yard.job()
    assert (job.state, job.phase, job.total_steps) == ("running", "preparing", None)
    assert job.started_at is not None
    (yard.settings.attempt_dir(JOB, 1) / "prepared").touch()
    job = yard.wait_for("succeeded")
    with yard.sessions.begin() as session:
        model = session.get_one(Model, job.fine_tuned_model)
        # Its parameters are those that the ranks train, not the base model's.
        assert (model.kind, model.base_model, model.parameters) == ("adapter", "tiny", 1000)


def test_ranks_see_no_secret(yard: Yard) -> None:
    yard.submit(seconds=0.2)
    yard.wait_for_step(1)
    found = [*yard.ranks(), *yard.processes()]
    environments = [Path(f"/proc/{process.pid}/environ").read_bytes() for process in found]
    supervisor = yard.supervisor().pid
    for process, environment in zip(found, environments, strict=True):
        if process.pid != supervisor:
            names = {line.split(b"=")[0] for line in environment.split(b"\0")}
            assert not names & {b"DATABASE_URL", b"REDIS_URL", b"SHARDYARD_ADMIN_KEY"}
            assert b"SHARDYARD_ATTEMPT" in names
    assert len(yard.ranks()) == 2
    assert yard.settings.database_url not in yard.log()


def test_a_killed_rank_costs_an_attempt_and_no_step(yard: Yard) -> None:
    yard.submit(seconds=0.25)
    yard.wait_for_step(6)
    yard.ranks()[1].signal(signal.SIGKILL)
    yard.wait_for("succeeded")
    expect_whole_run(yard)
    assert yard.attempts() == [(1, "crashed"), (2, None)]
    with yard.sessions.begin() as session:
        second = session.scalars(select(Attempt).where(Attempt.epoch == 2)).one()
        assert second.resumed_from_step is not None
        assert second.resumed_from_step >= 5


def test_ranks_die_with_a_killed_supervisor_and_the_job_goes_on(yard: Yard) -> None:
    yard.submit(seconds=0.25)
    yard.wait_for_step(6)
    assert len(yard.ranks()) == 2
    yard.supervisor().signal(signal.SIGKILL)
    wait_until(lambda: not yard.processes(), "the kernel has ended torchrun and the ranks", 5)
    yard.wait_for("succeeded")
    expect_whole_run(yard)
    assert yard.attempts() == [(1, "lost"), (2, None)]


def test_cancel(yard: Yard) -> None:
    yard.submit(seconds=0.1, save=1000, steps=1000)
    yard.wait_for_step(1)
    yard.want("cancel")
    job = yard.wait_for("cancelled", 15)
    assert job.reason == "cancelled_by_user"
    assert yard.processes() == [] or yard.processes() == [yard.supervisor()]
    with yard.sessions.begin() as session:
        assert session.scalars(select(Gpu).where(Gpu.attempt_id.is_not(None))).all() == []


def test_ranks_that_do_not_stop_are_killed_after_the_grace(yard: Yard) -> None:
    yard.submit(seconds=0.1, save=1000, steps=1000, deaf=True)
    yard.wait_for_step(1)
    yard.want("cancel")
    yard.wait_for("cancelled", 20)
    assert "killing them" in yard.log()


def test_pause_and_resume(yard: Yard) -> None:
    yard.submit(seconds=0.3, save=1000)
    yard.wait_for_step(2)
    yard.want("pause")
    job = yard.wait_for("paused", 15)
    assert job.reason == "paused_by_user"
    with yard.sessions.begin() as session:
        job = session.get_one(Job, JOB)
        job.desired, job.state = "run", "queued"
    yard.wait_for("succeeded")
    expect_whole_run(yard)
    assert yard.attempts() == [(1, "paused_by_user"), (2, None)]


def test_a_supervisor_asked_to_end_leaves_a_checkpoint_to_go_on_from(yard: Yard) -> None:
    yard.submit(seconds=0.3, save=1000)
    yard.wait_for_step(2)
    yard.supervisor().signal(signal.SIGTERM)
    job = yard.wait_for("succeeded")
    expect_whole_run(yard)
    assert job.attempts == 2
    assert job.attempts_without_checkpoint == 0


def test_a_hung_rank_is_ended_and_the_job_goes_on(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDYARD_HANG_SECONDS", "12")
    yard.submit(hang_at=7, seconds=0.05)
    yard.wait_for("succeeded")
    expect_whole_run(yard)
    assert yard.attempts() == [(1, "hung"), (2, None)]


def test_what_another_attempt_cannot_mend_is_not_repeated(yard: Yard) -> None:
    outcome = {
        "status": "failed",
        "reason": "invalid_training_file",
        "message": "x",
        "param": "training_file",
    }
    yard.submit(outcome_at=3, outcome=outcome)
    job = yard.wait_for("failed")
    told = (job.reason, job.error_message, job.error_param)
    assert told == ("invalid_training_file", "x", "training_file")
    assert job.attempts == 1


def test_a_fenced_attempt_ends_its_ranks_and_writes_nothing(yard: Yard) -> None:
    yard.submit(seconds=0.1, steps=1000)
    yard.wait_for_step(1)
    with yard.sessions.begin() as session:
        job = attempts.hold(session, JOB, 1)
        job.epoch, job.step = 2, 0
    wait_until(lambda: not yard.processes(), "the fenced attempt is gone", 15)
    assert yard.job().step == 0
    assert "no longer owns the job" in yard.log()


def test_training_goes_on_while_the_database_is_away(yard: Yard) -> None:
    yard.submit(seconds=0.2)
    yard.wait_for_step(1)
    directory = yard.settings.attempt_dir(JOB, 1)

    def steps_reached() -> int:
        return len(list(directory.glob("reached-0-*")))

    with yard.sessions.begin() as session:
        session.get_one(Job, JOB, with_for_update=True)
        ahead = steps_reached() + 5
        wait_until(lambda: steps_reached() >= ahead, "the ranks go on while nothing can be written", 10)
        waiting = text("SELECT count(*) FROM pg_locks WHERE NOT granted")
        wait_until(lambda: session.scalar(waiting), "the supervisor waits for the row", 10)
        others = select(func.pg_terminate_backend(column("pid"))).select_from(table("pg_stat_activity"))
        session.execute(others.where(text("datname = current_database() AND pid <> pg_backend_pid()")))
    job = yard.wait_for("succeeded")
    expect_whole_run(yard)
    assert job.attempts == 1
    assert "The database does not answer" in yard.log()


def test_a_supervisor_that_cannot_renew_its_lease_ends_its_ranks(yard: Yard) -> None:
    yard.submit(seconds=0.1, steps=1000)
    yard.wait_for_step(1)
    with yard.sessions.begin() as session:
        # The database accepts connections and does not answer: the row stays locked all the time.
        job = session.get_one(Job, JOB, with_for_update=True)
        wait_until(lambda: not yard.processes(), "the ranks are ended before the lease ends", 15)
        assert job.state == "running"
    assert "lost its lease" in yard.log()


def test_a_job_whose_results_cannot_be_written_is_no_success(yard: Yard) -> None:
    yard.settings.data_dir.mkdir(parents=True)
    (yard.settings.data_dir / "files").write_text("a file where the folder should be")
    yard.submit(steps=1, gpus=1)
    job = yard.wait_for("failed")
    assert (job.reason, job.attempts) == ("max_attempts", 3)
    assert job.error_message is not None
    assert "The host could not write the results" in job.error_message
    assert job.fine_tuned_model is None
    assert [reason for _, reason in yard.attempts()] == ["crashed"] * 3


def test_a_host_that_cannot_start_a_supervisor_gives_the_devices_back(yard: Yard) -> None:
    yard.submit()
    yard.settings.data_dir.mkdir(parents=True)
    (yard.settings.data_dir / "jobs").write_text("a file where the folder should be")
    job = yard.wait_for("failed")
    assert (job.reason, job.attempts) == ("max_attempts", 3)
    assert job.error_message is not None
    assert "The host could not start the job" in job.error_message
    with yard.sessions.begin() as session:
        assert session.scalars(select(Gpu).where(Gpu.attempt_id.is_not(None))).all() == []
