import subprocess
import sys
from collections.abc import Iterator

import pytest
from sqlalchemy import func, select, text, update
from sqlalchemy.orm import Session, sessionmaker

from jobs import attempts
from jobs.claims import claim
from jobs.settings import Settings
from jobs.tables import Attempt, Checkpoint, Gpu, Job
from tests.worker.records import HOST, add_host, add_job
from tests.worker.test_shipping import START, append, checkpoint, metrics
from worker import reaper as reaper_module
from worker import sweep
from worker.host import HostIdentity, boot_id
from worker.reaper import Reaper

Sessions = sessionmaker[Session]
JOB = "ftjob-reaped"
"""Of this file alone: sweeps find processes by job id all over the machine, where other tests run too."""
HERE = HostIdentity(HOST, boot_id(), "cpu", 2)
ELSEWHERE = HostIdentity("host-b", boot_id(), "cpu", 2)
REBOOTED = HostIdentity(HOST, "an earlier boot", "cpu", 2)


class Clock:
    now = 1000.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(reaper_module, "boot_clock", lambda: clock.now)
    return clock


@pytest.fixture
def claimed(sessions: Sessions, settings: Settings) -> None:
    with sessions.begin() as session:
        add_host(session, 2, boot_id=HERE.boot_id)
        add_job(session, JOB)
        assert claim(session, settings, HERE.name, HERE.boot_id) is not None


def expire_lease(sessions: Sessions) -> None:
    with sessions.begin() as session:
        session.execute(update(Job).values(lease_until=func.now() - text("interval '1 second'")))


def state(sessions: Sessions) -> str:
    with sessions.begin() as session:
        return session.get_one(Job, JOB).state


@pytest.mark.usefixtures("claimed")
@pytest.mark.parametrize("host", [HERE, ELSEWHERE, REBOOTED], ids=["here", "elsewhere", "rebooted"])
def test_a_silent_attempt_with_an_expired_lease_is_lost(
    sessions: Sessions, settings: Settings, clock: Clock, host: HostIdentity
) -> None:
    reaper = Reaper(settings, sessions, host)
    expire_lease(sessions)
    assert reaper.reap() == 0
    clock.now += settings.lease_seconds - 0.1
    assert reaper.reap() == 0
    clock.now += 0.2
    assert reaper.reap() == 1
    with sessions.begin() as session:
        job = session.get_one(Job, JOB)
        assert (job.state, job.reason) == ("retry_wait", "lost")
        assert session.scalars(select(Attempt)).one().ended_at is not None
        held = session.scalars(select(Gpu).where(Gpu.attempt_id.is_not(None))).all()
        # Only the attempt's own host, in the same boot, can prove that nothing of it is left.
        assert len(held) == (0 if host is HERE else 1)


@pytest.mark.usefixtures("claimed")
def test_silence_alone_is_not_enough(sessions: Sessions, settings: Settings, clock: Clock) -> None:
    reaper = Reaper(settings, sessions, ELSEWHERE)
    reaper.reap()
    clock.now += 100 * settings.lease_seconds
    assert reaper.reap() == 0
    assert state(sessions) == "starting"


@pytest.mark.usefixtures("claimed")
def test_an_expired_lease_alone_is_not_enough(sessions: Sessions, settings: Settings, clock: Clock) -> None:
    reaper = Reaper(settings, sessions, ELSEWHERE)
    for _ in range(5):
        with sessions.begin() as session:
            attempts.heartbeat(session, settings, JOB, 1)
        # As if the database's clock had jumped: the heartbeat goes on.
        expire_lease(sessions)
        assert reaper.reap() == 0
        clock.now += 0.7 * settings.lease_seconds
    assert state(sessions) == "starting"


@pytest.mark.usefixtures("claimed")
@pytest.mark.parametrize(("desired", "expected"), [("cancel", "cancelled"), ("pause", "paused")])
def test_reaping_honours_what_the_user_wants(
    sessions: Sessions, settings: Settings, clock: Clock, desired: str, expected: str
) -> None:
    with sessions.begin() as session:
        session.get_one(Job, JOB).desired = desired
    expire_lease(sessions)
    reaper = Reaper(settings, sessions, ELSEWHERE)
    reaper.reap()
    clock.now += settings.lease_seconds
    assert reaper.reap() == 1
    assert state(sessions) == expected


@pytest.fixture
def supervisor(sessions: Sessions, settings: Settings) -> Iterator[subprocess.Popen[bytes]]:
    """A process that stands for the supervisor, recorded as the attempt's."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    start = sweep.start_time(process.pid)
    assert start is not None
    with sessions.begin() as session:
        attempts.begin(session, settings, JOB, 1, process.pid, start)
    yield process
    process.kill()
    process.communicate()


@pytest.mark.usefixtures("claimed", "clock")
def test_a_supervisor_proved_gone_on_its_own_host_needs_no_waiting(
    sessions: Sessions, settings: Settings, supervisor: subprocess.Popen[bytes]
) -> None:
    here = Reaper(settings, sessions, HERE)
    assert here.reap() == 0
    supervisor.kill()
    supervisor.wait()
    # Other hosts, and other boots of this one, know nothing about its process ids.
    for other in (ELSEWHERE, REBOOTED):
        assert Reaper(settings, sessions, other).reap() == 0
    assert here.reap() == 1
    assert state(sessions) == "retry_wait"


@pytest.mark.usefixtures("claimed", "clock")
def test_devices_wait_until_no_process_of_the_attempt_is_left(sessions: Sessions, settings: Settings) -> None:
    expire_lease(sessions)
    with sessions.begin() as session:
        job = attempts.hold(session, JOB, 1)
        attempts.finish(session, settings, job, attempts.Ending(attempts.State.RETRY_WAIT), free_gpus=False)
    orphan = subprocess.Popen(
        [sys.executable, "-c", "input()"],
        stdin=subprocess.PIPE,
        env={sweep.ATTEMPT_VARIABLE: sweep.attempt_tag(JOB, 1)},
    )
    Reaper(settings, sessions, HERE).release_abandoned()
    assert orphan.wait(5) == -9
    orphan.communicate()
    with sessions.begin() as session:
        assert session.scalars(select(Gpu).where(Gpu.attempt_id.is_not(None))).all() == []


@pytest.mark.usefixtures("claimed", "clock")
def test_what_a_lost_attempt_wrote_last_is_shipped_before_the_job_goes_on(
    sessions: Sessions, settings: Settings, supervisor: subprocess.Popen[bytes]
) -> None:
    directory = settings.attempt_dir(JOB, 1)
    directory.mkdir(parents=True)
    append(directory / "events.jsonl", START, metrics(1), checkpoint(1, str(directory / "step-1")))
    supervisor.kill()
    supervisor.wait()
    assert Reaper(settings, sessions, HERE).reap() == 1
    with sessions.begin() as session:
        assert session.scalars(select(Checkpoint.step)).all() == [1]
        assert session.get_one(Job, JOB).step == 1
    assert state(sessions) == "retry_wait"
