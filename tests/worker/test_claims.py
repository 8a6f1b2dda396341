import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import func, select, text, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session, sessionmaker

from jobs import attempts, hosts
from jobs.attempts import Ending
from jobs.claims import ClaimedJob, claim, promote
from jobs.settings import Settings
from jobs.state import Reason, State
from jobs.tables import Attempt, Gpu, Job
from tests.worker.records import BOOT, HOST, add_host, add_job

Sessions = sessionmaker[Session]


def claim_one(sessions: Sessions, settings: Settings, job_id: str | None = None) -> ClaimedJob | None:
    with sessions.begin() as session:
        return claim(session, settings, HOST, BOOT, job_id)


def at_once(count: int, sessions: Sessions, settings: Settings) -> list[ClaimedJob]:
    barrier = threading.Barrier(count)

    def one(_: int) -> ClaimedJob | None:
        barrier.wait()
        return claim_one(sessions, settings)

    with ThreadPoolExecutor(count) as pool:
        return [claimed for claimed in pool.map(one, range(count)) if claimed is not None]


def test_claim_takes_lease_gpus_and_epoch(sessions: Sessions, settings: Settings) -> None:
    with sessions.begin() as session:
        add_host(session, 4)
        add_job(session, gpus=2)
    assert claim_one(sessions, settings) == ClaimedJob("ftjob-1", 1, (0, 1))
    with sessions.begin() as session:
        job = session.get_one(Job, "ftjob-1")
        assert (job.state, job.epoch, job.attempts, job.worker) == ("starting", 1, 1, HOST)
        lease = session.scalar(select(Job.lease_until - func.now()))
        assert lease is not None
        assert 0 < lease.total_seconds() <= settings.lease_seconds
        attempt = session.scalars(select(Attempt)).one()
        assert (attempt.job_id, attempt.epoch, attempt.host, attempt.boot_id) == ("ftjob-1", 1, HOST, BOOT)
        held = session.scalars(select(Gpu.idx).where(Gpu.attempt_id == attempt.id).order_by(Gpu.idx))
        assert list(held) == [0, 1]
    assert claim_one(sessions, settings) is None


def test_one_of_many_threads_wins_a_job(sessions: Sessions, settings: Settings) -> None:
    with sessions.begin() as session:
        add_host(session, 16)
        add_job(session)
    assert len(at_once(8, sessions, settings)) == 1
    with sessions.begin() as session:
        assert session.scalar(select(func.count()).select_from(Attempt)) == 1


def test_gpus_are_never_given_twice(sessions: Sessions, settings: Settings) -> None:
    with sessions.begin() as session:
        add_host(session, 5)
        for index in range(8):
            add_job(session, f"ftjob-{index}", gpus=1 + index % 2)
    claimed = at_once(8, sessions, settings)
    while (more := claim_one(sessions, settings)) is not None:
        claimed.append(more)
    given = [gpu for job in claimed for gpu in job.gpus]
    assert sorted(given) == sorted(set(given))
    assert len(given) == 5
    with sessions.begin() as session:
        for job in claimed:
            holder = (
                select(Attempt.job_id).join(Gpu, Gpu.attempt_id == Attempt.id).where(Gpu.idx.in_(job.gpus))
            )
            assert set(session.scalars(holder)) == {job.job_id}


def test_order_is_priority_then_age(sessions: Sessions, settings: Settings) -> None:
    with sessions.begin() as session:
        add_host(session, 4)
    for name, priority in (("old", 0), ("young", 0), ("urgent", 5)):
        with sessions.begin() as session:
            add_job(session, name, priority=priority)
    order = [claim_one(sessions, settings) for _ in range(3)]
    assert [claimed.job_id for claimed in order if claimed] == ["urgent", "old", "young"]


def test_a_small_job_passes_one_that_does_not_fit(sessions: Sessions, settings: Settings) -> None:
    with sessions.begin() as session:
        add_host(session, 2)
        add_job(session, "large", gpus=3, priority=9)
        add_job(session, "small", gpus=1)
    claimed = claim_one(sessions, settings)
    assert claimed is not None
    assert claimed.job_id == "small"


@pytest.mark.parametrize(
    "columns",
    [{"desired": "cancel"}, {"desired": "pause"}, {"state": "retry_wait"}, {"state": "paused"}],
    ids=str,
)
def test_what_is_not_waiting_is_not_claimed(
    sessions: Sessions, settings: Settings, columns: dict[str, str]
) -> None:
    with sessions.begin() as session:
        add_host(session, 2)
        add_job(session, **columns)
    assert claim_one(sessions, settings) is None
    assert claim_one(sessions, settings, "ftjob-1") is None


def test_a_job_waits_for_its_time(sessions: Sessions, settings: Settings) -> None:
    with sessions.begin() as session:
        add_host(session, 2)
        add_job(session, state="retry_wait")
        session.execute(update(Job).values(run_at=text("now() + interval '1 hour'")))
        assert promote(session) == 0
    with sessions.begin() as session:
        session.execute(update(Job).values(run_at=text("now()")))
    with sessions.begin() as session:
        assert promote(session) == 1
    assert claim_one(sessions, settings) is not None


def test_the_database_refuses_a_second_live_attempt(sessions: Sessions, settings: Settings) -> None:
    with sessions.begin() as session:
        add_host(session, 2)
        add_job(session)
    claim_one(sessions, settings)
    with pytest.raises(IntegrityError, match="attempts_alive"), sessions.begin() as session:
        session.add(Attempt(job_id="ftjob-1", epoch=2, host=HOST, boot_id=BOOT))


def test_registering_again_keeps_what_is_in_use(sessions: Sessions, settings: Settings) -> None:
    with sessions.begin() as session:
        add_host(session, 3)
        add_job(session, "first", gpus=2)
        add_job(session, "second", gpus=1)
    claim_one(sessions, settings, "first")
    with sessions.begin() as session:
        add_host(session, 1, boot_id="boot-2")
    with sessions.begin() as session:
        rows = session.execute(select(Gpu.idx, Gpu.attempt_id.is_not(None)).order_by(Gpu.idx)).all()
        assert [tuple(row) for row in rows] == [(0, True), (1, True)]
        job = attempts.hold(session, "first", 1)
        attempts.finish(session, settings, job, Ending(State.FAILED, Reason.NAN_LOSS, "loss is not a number"))
    # One slot now: the row above it is free and must not be given out.
    assert claim_one(sessions, settings, "second") == ClaimedJob("second", 1, (0,))
    with sessions.begin() as session:
        add_host(session, 1)
        assert list(session.scalars(select(Gpu.idx))) == [0]


def test_devices_of_an_attempt_ended_from_elsewhere_wait_for_their_host(
    sessions: Sessions, settings: Settings
) -> None:
    with sessions.begin() as session:
        add_host(session, 1)
        add_job(session)
    claim_one(sessions, settings)
    with sessions.begin() as session:
        job = attempts.hold(session, "ftjob-1", 1)
        attempts.finish(session, settings, job, Ending(State.RETRY_WAIT, Reason.LOST), free_gpus=False)
    with sessions.begin() as session:
        assert hosts.abandoned(session, "host-b") == []
        assert hosts.abandoned(session, HOST) == [("ftjob-1", 1)]
        session.execute(update(Job).values(run_at=func.now()))
    with sessions.begin() as session:
        promote(session)
    assert claim_one(sessions, settings) is None
    with sessions.begin() as session:
        hosts.release(session, HOST, "ftjob-1", 1)
        assert hosts.abandoned(session, HOST) == []
    assert claim_one(sessions, settings) == ClaimedJob("ftjob-1", 2, (0,))
