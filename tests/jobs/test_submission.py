"""The one door: what is accepted is there with its event and its wake message, or not at all."""

import io
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select, text
from sqlalchemy.orm import Session, sessionmaker

from jobs.errors import Conflict, InvalidRequest, NotFound, StorageFull, TooLarge, Unprocessable
from jobs.files import delete_file, file_path, list_files, record_file, remove_bytes, store_upload
from jobs.hosts import register
from jobs.ids import new_id
from jobs.intent import cancel, pause, resume
from jobs.keys import authenticate, create_key
from jobs.models import add_base_model, get_model, list_models
from jobs.queries import get_job, list_events, list_jobs
from jobs.settings import Settings
from jobs.spec import parse_request
from jobs.state import LIVE, TERMINAL, State
from jobs.submission import Submitted, submit
from jobs.tables import Event, File, Job, Metric, Model, Outbox, Team
from jobs.telemetry import telemetry
from tests.tiny_model import write_chat_file, write_tiny_model

Sessions = sessionmaker[Session]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def training_file(database: Sessions, settings: Settings, team: str, tmp_path: Path, model_dir: Path) -> str:
    """A good file's id, in a database that also has the model ``tiny``."""
    with database.begin() as session:
        add_base_model(session, "tiny", str(model_dir))
    content = write_chat_file(tmp_path / "train.jsonl", 12).read_bytes()
    return upload(database, settings, team, content)


def upload(database: Sessions, settings: Settings, team: str, content: bytes) -> str:
    stored = store_upload(settings, io.BytesIO(content), "train.jsonl", "fine-tune")
    with database.begin() as session:
        return record_file(session, team, stored).id


def post(database: Sessions, settings: Settings, team: str, training_file: str, **more: Any) -> Submitted:
    keywords = {name: more.pop(name) for name in ("idempotency_key", "is_retry") if name in more}
    request = parse_request({"model": "tiny", "training_file": training_file} | more)
    with database.begin() as session:
        return submit(session, settings, team, request, **keywords)


def test_a_job_comes_with_its_event_its_wake_message_and_its_plan(
    database: Sessions, settings: Settings, team: str, training_file: str
) -> None:
    job = post(database, settings, team, training_file, training={"zero_stage": 1}).job
    with database.begin() as session:
        assert session.scalars(select(Outbox.job_id)).all() == [job.id]
        (event,) = list_events(session, team, job.id).data
        assert event.message == f"Created fine-tuning job: {job.id}"
        stored = get_job(session, team, job.id)
        assert stored.state == State.QUEUED
        assert stored.spec["training"]["zero_stage"] == 1
        assert Path(stored.spec["training_file_path"]).is_file()
        parameters = stored.spec["parameters"]
        assert stored.plan is not None
        assert stored.plan["bytes_per_rank"]["optimizer"] == 8 * parameters > 0
        assert stored.warnings == ["No worker host has registered yet; the job waits for one."]


def test_more_ranks_than_any_host_has_are_refused_with_the_number_there_is(
    database: Sessions, settings: Settings, team: str, training_file: str
) -> None:
    with database.begin() as session:
        register(session, "host-a", "boot", "cpu", 2)
    with pytest.raises(Unprocessable, match="3 are asked for, and the largest host has 2"):
        post(database, settings, team, training_file, resources={"gpus": 3})
    assert post(database, settings, team, training_file, resources={"gpus": 2}).job.warnings == []


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"model": "gpt-9"}, "model"),
        ({"training_file": "file-nowhere"}, "training_file"),
        ({"validation_file": "file-nowhere"}, "validation_file"),
    ],
)
def test_what_does_not_exist_is_named_and_nothing_is_left(
    database: Sessions, settings: Settings, team: str, training_file: str, given: dict[str, str], param: str
) -> None:
    with pytest.raises(NotFound) as caught:
        post(database, settings, team, **{"training_file": training_file, **given})
    assert caught.value.param == param
    with database.begin() as session:
        assert session.scalar(select(func.count()).select_from(Job)) == 0
        assert session.scalar(select(func.count()).select_from(Event)) == 0


def test_another_teams_file_does_not_exist(
    database: Sessions, settings: Settings, team: str, training_file: str
) -> None:
    with database.begin() as session:
        other = Team(id=new_id("team-"), name="other")
        session.add(other)
    with pytest.raises(NotFound, match="there is no file"):
        post(database, settings, other.id, training_file)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"messages": [{"role": "user", "content": "hi"}]}\n' * 12, "line 1"),
        (b"not json\n" * 12, "line 1"),
        (
            b'{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}\n',
            "10",
        ),
    ],
    ids=["no assistant", "no json", "too few"],
)
def test_a_job_on_a_bad_file_fails_and_says_where(
    database: Sessions, settings: Settings, team: str, training_file: str, content: bytes, words: str
) -> None:
    bad = upload(database, settings, team, content)
    job = post(database, settings, team, bad).job
    assert (job.state, job.reason, job.error_param) == ("failed", "invalid_training_file", "training_file")
    assert words in (job.error_message or "")
    validated = post(database, settings, team, training_file, validation_file=bad).job
    if "10" not in words:
        assert (validated.state, validated.reason) == ("failed", "invalid_validation_file")
    with database.begin() as session:
        assert session.scalars(select(Outbox.job_id)).all() == ([validated.id] if "10" in words else [])


PAIR = (
    b'{"input": {"messages": [{"role": "user", "content": "hi"}]}, '
    b'"preferred_output": [{"role": "assistant", "content": "ho"}], '
    b'"non_preferred_output": [{"role": "assistant", "content": "no"}]}\n'
)


def test_a_file_and_a_method_that_do_not_go_together_fail_the_job(
    database: Sessions, settings: Settings, team: str, training_file: str
) -> None:
    pairs = upload(database, settings, team, PAIR * 12)
    for method, file, state in (
        ("dpo", pairs, "queued"),
        ("supervised", training_file, "queued"),
        ("dpo", training_file, "failed"),
        ("supervised", pairs, "failed"),
    ):
        for given in ({"method": {"type": method}}, {"training": {"method": method}}):
            job = post(database, settings, team, file, **given).job
            assert (job.state, job.error_param) == (state, None if state == "queued" else "training_file")
    mixed = post(database, settings, team, pairs, training={"method": "dpo"}, validation_file=training_file)
    assert (mixed.job.state, mixed.job.reason) == ("failed", "invalid_validation_file")


def test_of_a_lora_job_the_frozen_base_alone_is_planned(
    database: Sessions, settings: Settings, team: str, training_file: str
) -> None:
    training = {"lora": {"quantization": "nf4"}, "zero_stage": 3}
    job = post(database, settings, team, training_file, training=training).job
    assert job.plan is not None
    assert job.plan["counts"] == "frozen base"
    # Half a byte an element, and a scale of four bytes for each 64.
    parameters = round(job.spec["parameters"] * (0.5 + 4 / 64))
    assert job.plan["bytes_per_rank"] == {"parameters": parameters, "gradients": 0, "optimizer": 0}


def test_a_job_starts_from_a_whole_model_alone(
    database: Sessions, settings: Settings, team: str, training_file: str
) -> None:
    with database.begin() as session:
        for kind in ("adapter", "checkpoint"):
            session.add(Model(id=kind, team_id=team, kind=kind, path="/", base_model="tiny"))
    for kind, words in (("adapter", "adapter of 'tiny'.*merge"), ("checkpoint", "finished")):
        with pytest.raises(Unprocessable, match=words) as caught:
            post(database, settings, team, training_file, model=kind)
        assert caught.value.param == "model"


def test_the_same_key_is_the_same_job_also_at_the_same_time(
    database: Sessions, settings: Settings, team: str, training_file: str
) -> None:
    with ThreadPoolExecutor(8) as threads:
        submitted = list(
            threads.map(
                lambda _: post(database, settings, team, training_file, idempotency_key="once"), range(8)
            )
        )
    assert len({one.job.id for one in submitted}) == 1
    assert [one.created for one in submitted].count(True) == 1
    with pytest.raises(Conflict, match="used for another request"):
        post(database, settings, team, training_file, idempotency_key="once", seed=7)


def test_a_clients_own_retry_is_the_same_job_and_a_new_request_is_not(
    database: Sessions, settings: Settings, team: str, training_file: str
) -> None:
    first = post(database, settings, team, training_file)
    again = post(database, settings, team, training_file, is_retry=True)
    assert again.job.id == first.job.id
    assert not again.created
    assert post(database, settings, team, training_file).created
    assert post(database, settings, team, training_file, is_retry=True, seed=7).created


def test_a_retry_waits_for_a_first_try_that_has_not_committed(
    database: Sessions, settings: Settings, team: str, training_file: str
) -> None:
    request = parse_request({"model": "tiny", "training_file": training_file})
    with ThreadPoolExecutor(1) as thread, database.begin() as session:
        first = submit(session, settings, team, request)
        retry = thread.submit(post, database, settings, team, training_file, is_retry=True)
        waiting = text("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted")
        deadline = time.monotonic() + 30
        while not session.scalar(waiting):
            assert time.monotonic() < deadline
            assert not retry.done()
        session.commit()
        assert retry.result(timeout=30).job.id == first.job.id


def test_a_queued_job_is_cancelled_paused_and_resumed_at_once(
    database: Sessions, settings: Settings, team: str, training_file: str
) -> None:
    job = post(database, settings, team, training_file).job
    with database.begin() as session:
        assert pause(session, team, job.id).state == State.PAUSED
        assert resume(session, team, job.id).state == State.QUEUED
        cancelled = cancel(session, team, job.id)
    assert (cancelled.state, cancelled.reason) == ("cancelled", "cancelled_by_user")
    assert cancelled.finished_at is not None
    assert cancelled.version == 4
    for action in (cancel, pause, resume):
        with database.begin() as session, pytest.raises(Conflict):
            action(session, team, job.id)


@pytest.mark.parametrize("state", sorted(State))
def test_a_cancel_writes_the_state_only_where_nobody_holds_the_job(
    database: Sessions, settings: Settings, team: str, training_file: str, state: State
) -> None:
    job_id = post(database, settings, team, training_file).job.id
    with database.begin() as session:
        session.get_one(Job, job_id).state = state
    with database.begin() as session:
        if state in TERMINAL:
            with pytest.raises(Conflict, match="already"):
                cancel(session, team, job_id)
        elif state in LIVE:
            job = cancel(session, team, job_id)
            assert (job.state, job.desired) == (state, "cancel")
        else:
            assert cancel(session, team, job_id).state == State.CANCELLED


def test_lists_go_on_where_the_cursor_points_and_refuse_an_unknown_one(
    database: Sessions, settings: Settings, team: str, training_file: str
) -> None:
    ids = [
        post(database, settings, team, training_file, metadata={"parity": str(i % 2)}).job.id
        for i in range(5)
    ]
    with database.begin() as session:
        first = list_jobs(session, team, limit=2)
        second = list_jobs(session, team, limit=2, after=first.data[-1].id)
        third = list_jobs(session, team, limit=2, after=second.data[-1].id)
        assert [job.id for page in (first, second, third) for job in page.data] == ids[::-1]
        assert [page.has_more for page in (first, second, third)] == [True, True, False]
        assert [job.id for job in list_jobs(session, team, metadata={"parity": "1"}).data] == [ids[3], ids[1]]
        with pytest.raises(InvalidRequest, match="nothing in this list has the id"):
            list_jobs(session, team, after="ftjob-unknown")
        assert list_jobs(session, "team-other").data == []


def test_an_upload_over_the_limit_or_onto_a_full_disk_leaves_nothing(settings: Settings) -> None:
    small = settings.model_copy(update={"max_upload_bytes": 10})
    with pytest.raises(TooLarge, match="larger than 10 bytes"):
        store_upload(small, io.BytesIO(b"x" * 11), "a.jsonl", "fine-tune")
    full = settings.model_copy(update={"min_free_bytes": 2**62})
    with pytest.raises(StorageFull, match="free some space"):
        store_upload(full, io.BytesIO(b"x"), "a.jsonl", "fine-tune")
    assert list(settings.files_dir.iterdir()) == []


def test_a_write_that_finds_the_disk_full_leaves_nothing(settings: Settings) -> None:
    class Full(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            raise OSError(28, "No space left on device")

    with pytest.raises(StorageFull, match="disk is full"):
        store_upload(settings, Full(), "a.jsonl", "fine-tune")
    assert list(settings.files_dir.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "purpose", "param"), [(b"", "fine-tune", "file"), (b"{}", "batch", "purpose")]
)
def test_an_empty_file_and_a_foreign_purpose_are_refused(
    settings: Settings, content: bytes, purpose: str, param: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        store_upload(settings, io.BytesIO(content), "a.jsonl", purpose)
    assert caught.value.param == param


def test_a_file_that_a_job_waits_for_is_not_deleted(
    database: Sessions, settings: Settings, team: str, training_file: str
) -> None:
    job = post(database, settings, team, training_file).job
    with database.begin() as session, pytest.raises(Conflict, match=job.id):
        delete_file(session, team, training_file)
    with database.begin() as session:
        cancel(session, team, job.id)
        delete_file(session, team, training_file)
        assert list_files(session, team).data == []
        assert session.get_one(File, training_file).deleted_at is not None
    assert file_path(settings, training_file).exists()
    remove_bytes(settings, training_file)
    assert not file_path(settings, training_file).exists()


def test_a_model_is_registered_once_and_only_if_it_is_one(
    database: Sessions, team: str, tmp_path: Path, model_dir: Path
) -> None:
    (tmp_path / "empty").mkdir()
    with database.begin() as session:
        assert add_base_model(session, "tiny", str(model_dir)).parameters
        add_base_model(session, "tiny", str(model_dir))
        assert [model.id for model in list_models(session, team)] == ["tiny"]
        for name, path, words in (
            ("a b", str(model_dir), "not a model name"),
            ("ft:x", str(model_dir), "not a model name"),
            ("x", "relative", "not absolute"),
            ("x", str(tmp_path / "empty"), "config.json"),
            ("x", str(tmp_path / "nowhere"), "not a directory"),
        ):
            with pytest.raises(InvalidRequest, match=words):
                add_base_model(session, name, path)
        with pytest.raises(NotFound):
            get_model(session, team, "x")
    copy = write_tiny_model(tmp_path / "copy")
    with database.begin() as session, pytest.raises(Conflict, match="another path"):
        add_base_model(session, "tiny", str(copy))


def test_a_key_is_kept_as_a_digest_alone(database: Sessions, team: str) -> None:
    with database.begin() as session:
        secret = create_key(session, team, "mine", "member")
        assert authenticate(session, secret).role == "member"
        dump = session.execute(text("SELECT string_agg(k::text, ' ') FROM api_keys k")).scalar_one()
    assert secret[:12] in dump
    assert secret[13:] not in dump


def test_steps_of_a_lost_attempt_are_not_shown_until_they_are_done_again(
    database: Sessions, settings: Settings, team: str, training_file: str
) -> None:
    job_id = post(database, settings, team, training_file).job.id
    with database.begin() as session:
        session.add_all(Metric(job_id=job_id, step=step, epoch=1, train_loss=1.0) for step in range(1, 9))
        session.get_one(Job, job_id).step = 8
    with database.begin() as session:
        assert [row.step for row in telemetry(session, team, job_id, 2, 4)[1]] == [3, 4, 5, 6]
        session.get_one(Job, job_id).step = 4
    with database.begin() as session:
        assert [row.step for row in telemetry(session, team, job_id)[1]] == [1, 2, 3, 4]
