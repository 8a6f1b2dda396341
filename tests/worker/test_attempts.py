from collections.abc import Callable

import pytest
from sqlalchemy import func, select
from sqlalchemy.orm import Session, sessionmaker

from jobs import attempts, runs, shipping
from jobs.attempts import Ending
from jobs.claims import claim
from jobs.errors import Fenced
from jobs.plans import plan_of
from jobs.settings import Settings
from jobs.state import Desired, Reason, State
from jobs.tables import Attempt, Checkpoint, Event, Gpu, Job
from tests.worker.records import BOOT, HOST, add_host, add_job

Sessions = sessionmaker[Session]


@pytest.fixture
def claimed(sessions: Sessions, settings: Settings) -> None:
    with sessions.begin() as session:
        add_host(session, 2)
        add_job(session)
        assert claim(session, settings, HOST, BOOT) is not None


def set_job(sessions: Sessions, **columns: object) -> None:
    with sessions.begin() as session:
        job = session.get_one(Job, "ftjob-1")
        for name, value in columns.items():
            setattr(job, name, value)


def finish(sessions: Sessions, settings: Settings, ending: Ending) -> State:
    with sessions.begin() as session:
        job = attempts.hold(session, "ftjob-1", 1)
        return attempts.finish(session, settings, job, ending)


WRITES: dict[str, Callable[[Session, Settings, int], object]] = {
    "begin": lambda session, settings, epoch: attempts.begin(session, settings, "ftjob-1", epoch, 1, 1),
    "heartbeat": lambda session, settings, epoch: attempts.heartbeat(session, settings, "ftjob-1", epoch),
    "heed": lambda session, _, epoch: attempts.heed(session, "ftjob-1", epoch),
    "hold": lambda session, _, epoch: attempts.hold(session, "ftjob-1", epoch),
    "ship": lambda session, _, epoch: shipping.ship(session, "ftjob-1", epoch, []),
}


@pytest.mark.usefixtures("claimed")
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_only_the_live_epoch_writes(
    sessions: Sessions, settings: Settings, write: Callable[[Session, Settings, int], object]
) -> None:
    with sessions.begin() as session:
        write(session, settings, 1)
    for stale in (0, 2):
        with pytest.raises(Fenced), sessions.begin() as session:
            write(session, settings, stale)
    for state in set(State) - attempts.LIVE:
        set_job(sessions, state=state)
        with pytest.raises(Fenced), sessions.begin() as session:
            write(session, settings, 1)


@pytest.mark.usefixtures("claimed")
def test_heartbeat_extends_the_lease_by_the_databases_clock(sessions: Sessions, settings: Settings) -> None:
    with sessions.begin() as session:
        session.get_one(Job, "ftjob-1").lease_until = func.now()
    with sessions.begin() as session:
        before = session.get_one(Job, "ftjob-1").heartbeat_seq
        attempts.heartbeat(session, settings, "ftjob-1", 1)
    with sessions.begin() as session:
        assert session.get_one(Job, "ftjob-1").heartbeat_seq == before + 1
        left = session.scalar(select(Job.lease_until - func.now()))
        assert left is not None
        assert settings.lease_seconds - 1 < left.total_seconds() <= settings.lease_seconds


@pytest.mark.usefixtures("claimed")
@pytest.mark.parametrize(
    ("state", "desired", "expected"),
    [
        ("starting", "run", "starting"),
        ("starting", "pause", "starting"),
        ("running", "pause", "pausing"),
        ("starting", "cancel", "cancelling"),
        ("running", "cancel", "cancelling"),
        ("pausing", "cancel", "cancelling"),
        ("pausing", "run", "pausing"),
        ("cancelling", "run", "cancelling"),
    ],
)
def test_heeding_shows_in_the_state(sessions: Sessions, state: str, desired: str, expected: str) -> None:
    set_job(sessions, state=state, desired=desired)
    with sessions.begin() as session:
        assert attempts.heed(session, "ftjob-1", 1) == Desired(desired)
    with sessions.begin() as session:
        assert session.get_one(Job, "ftjob-1").state == expected


LOST = Ending(State.RETRY_WAIT, Reason.LOST)
SUCCEEDED = Ending(State.SUCCEEDED)
PAUSED = Ending(State.PAUSED, Reason.PAUSED_BY_USER)
CRASHED = Ending(State.FAILED, Reason.CRASHED, "exit code 1")
OOM = Ending(State.FAILED, Reason.OOM, "out of memory on rank 1 in step 12")
NAN = Ending(State.FAILED, Reason.NAN_LOSS, "not finite at step 3")


@pytest.mark.usefixtures("claimed")
@pytest.mark.parametrize(
    ("state", "desired", "ending", "expected"),
    [
        ("running", "run", SUCCEEDED, ("succeeded", None)),
        ("starting", "run", SUCCEEDED, ("succeeded", None)),
        ("pausing", "pause", SUCCEEDED, ("succeeded", None)),
        ("running", "cancel", SUCCEEDED, ("succeeded", None)),
        ("cancelling", "cancel", SUCCEEDED, ("cancelled", "cancelled_by_user")),
        ("running", "run", NAN, ("failed", "nan_loss")),
        ("pausing", "pause", NAN, ("failed", "nan_loss")),
        ("cancelling", "cancel", NAN, ("cancelled", "cancelled_by_user")),
        ("running", "run", CRASHED, ("retry_wait", "crashed")),
        ("running", "run", OOM, ("retry_wait", "oom")),
        ("pausing", "pause", OOM, ("paused", "paused_by_user")),
        ("running", "cancel", OOM, ("cancelled", "cancelled_by_user")),
        ("running", "run", LOST, ("retry_wait", "lost")),
        ("starting", "run", LOST, ("retry_wait", "lost")),
        ("running", "cancel", LOST, ("cancelled", "cancelled_by_user")),
        ("starting", "cancel", CRASHED, ("cancelled", "cancelled_by_user")),
        ("cancelling", "cancel", LOST, ("cancelled", "cancelled_by_user")),
        ("pausing", "pause", LOST, ("paused", "paused_by_user")),
        ("starting", "pause", LOST, ("paused", "paused_by_user")),
        ("pausing", "pause", PAUSED, ("paused", "paused_by_user")),
        ("starting", "pause", PAUSED, ("paused", "paused_by_user")),
        ("pausing", "run", PAUSED, ("retry_wait", None)),
        ("running", "run", PAUSED, ("retry_wait", None)),
        ("running", "cancel", PAUSED, ("cancelled", "cancelled_by_user")),
    ],
)
def test_an_ending_honours_what_the_user_wants(
    sessions: Sessions,
    settings: Settings,
    state: str,
    desired: str,
    ending: Ending,
    expected: tuple[str, str | None],
) -> None:
    set_job(sessions, state=state, desired=desired)
    with sessions.begin() as session:
        version = session.get_one(Job, "ftjob-1").version
    assert finish(sessions, settings, ending) == expected[0]
    with sessions.begin() as session:
        job = session.get_one(Job, "ftjob-1")
        assert (job.state, job.reason) == expected
        assert job.version > version
        assert job.lease_until is None
        assert (job.finished_at is not None) == (job.state in {"succeeded", "failed", "cancelled"})
        assert (job.error_message is not None) == (job.state == "failed")
        assert session.scalars(select(Attempt)).one().ended_at is not None
        assert session.scalars(select(Gpu).where(Gpu.attempt_id.is_not(None))).all() == []
        assert session.scalars(select(Event)).all()


@pytest.mark.usefixtures("claimed")
def test_poison_ends_after_as_many_attempts_as_configured(sessions: Sessions, settings: Settings) -> None:
    for epoch in (1, 2, 3):
        set_job(sessions, state="running", epoch=epoch)
        with sessions.begin() as session:
            if epoch > 1:
                session.add(Attempt(job_id="ftjob-1", epoch=epoch, host=HOST, boot_id=BOOT))
        with sessions.begin() as session:
            job = attempts.hold(session, "ftjob-1", epoch)
            state = attempts.finish(session, settings, job, CRASHED)
        assert state == ("failed" if epoch == 3 else "retry_wait")
    with sessions.begin() as session:
        job = session.get_one(Job, "ftjob-1")
        assert job.reason == "max_attempts"
        assert job.error_message == "3 attempts in a row left no new checkpoint. exit code 1"


@pytest.mark.usefixtures("claimed")
def test_an_attempt_with_a_checkpoint_is_not_counted(sessions: Sessions, settings: Settings) -> None:
    set_job(sessions, state="running", attempts_without_checkpoint=2)
    with sessions.begin() as session:
        session.add(
            Checkpoint(
                id="ftckpt_1", job_id="ftjob-1", epoch=1, step=5, path="x", manifest_sha256="", bytes=1
            )
        )
    assert finish(sessions, settings, CRASHED) == "retry_wait"


@pytest.mark.usefixtures("claimed")
def test_an_attempt_stopped_on_purpose_is_not_counted(sessions: Sessions, settings: Settings) -> None:
    set_job(sessions, state="running", attempts_without_checkpoint=2)
    stopped = Ending(State.RETRY_WAIT, blame=False)
    assert finish(sessions, settings, stopped) == "retry_wait"
    with sessions.begin() as session:
        assert session.get_one(Job, "ftjob-1").attempts_without_checkpoint == 2


@pytest.mark.usefixtures("claimed")
def test_memory_that_runs_out_costs_plans_and_no_attempts(sessions: Sessions, settings: Settings) -> None:
    """Down the ladder, one attempt a rung, each told to its ranks; then the job says that it has ended."""
    training = {"per_device_train_batch_size": 8, "train_batch_size": 8, "gradient_checkpointing": True}
    with sessions.begin() as session:
        job = session.get_one(Job, "ftjob-1")
        job.spec = job.spec | {"training": training}
        attempts.alive(session, job).plan = plan_of(training)
    told = []
    for epoch in range(1, 5):
        with sessions.begin() as session:
            job = attempts.hold(session, "ftjob-1", epoch)
            told.append(runs.inputs(session, settings, job)["train"]["per_device_train_batch_size"])
            state = attempts.finish(session, settings, job, OOM)
        if state == "retry_wait":
            with sessions.begin() as session:
                job = session.get_one(Job, "ftjob-1")
                job.state = State.QUEUED
                job.run_at = func.now()
            with sessions.begin() as session:
                assert claim(session, settings, HOST, BOOT) is not None
    assert told == [8, 4, 2, 1]
    with sessions.begin() as session:
        job = session.get_one(Job, "ftjob-1")
        assert (job.state, job.reason, job.attempts_without_checkpoint) == ("failed", "oom", 0)
        assert job.error_message is not None
        assert job.error_message.startswith("out of memory on rank 1 in step 12. No cheaper plan is left.")
        ran = session.scalars(select(Attempt).order_by(Attempt.epoch))
        assert [attempt.plan["per_device_train_batch_size"] for attempt in ran if attempt.plan] == told
        said = session.scalars(select(Event.message).where(Event.level == "warn").order_by(Event.id)).all()
    assert said[::2] == [
        f"out of memory on rank 1 in step 12: micro-batch {before} -> {after}"
        for before, after in ((8, 4), (4, 2), (2, 1))
    ]
