"""The unmodified OpenAI SDK against the server: what its users do, without a worker."""

import base64
from pathlib import Path

import httpx
import openai as sdk
import pytest
from openai import OpenAI
from sqlalchemy import select

from jobs.results import COLUMNS, write_results
from jobs.state import State
from jobs.tables import Checkpoint, Event, Job, Metric, Model
from tests.api.conftest import Server, TeamOfTest
from tests.tiny_model import write_chat_file

JOB_KEYS = {
    "id", "object", "created_at", "finished_at", "error", "fine_tuned_model", "hyperparameters", "model",
    "organization_id", "result_files", "status", "trained_tokens", "training_file", "validation_file",
    "seed", "method", "integrations", "metadata", "estimated_finish",
}  # fmt: skip
NATIVE_KEYS = {
    "phase", "reason", "progress", "plan", "attempts", "resolved_config", "warnings", "resources",
    "priority", "started_at",
}  # fmt: skip


def test_a_file_is_uploaded_shown_listed_read_and_deleted(openai: OpenAI, tmp_path: Path) -> None:
    path = write_chat_file(tmp_path / "train.jsonl", 12)
    file = openai.files.create(file=path, purpose="fine-tune")
    assert (file.object, file.status, file.purpose) == ("file", "processed", "fine-tune")
    assert (file.filename, file.bytes) == ("train.jsonl", path.stat().st_size)
    assert openai.files.retrieve(file.id) == file
    assert [found.id for found in openai.files.list()] == [file.id]
    assert openai.files.content(file.id).content == path.read_bytes()
    assert openai.files.delete(file.id).deleted
    with pytest.raises(sdk.NotFoundError):
        openai.files.retrieve(file.id)


def test_a_job_has_every_key_of_openai_and_ours_beside(
    openai: OpenAI, http: httpx.Client, team: TeamOfTest, training_file: str
) -> None:
    job = openai.fine_tuning.jobs.create(
        model="tiny",
        training_file=training_file,
        suffix="mine",
        seed=7,
        metadata={"run": "a"},
        method={
            "type": "supervised",
            "supervised": {"hyperparameters": {"n_epochs": 2, "learning_rate_multiplier": 0.3}},
        },
        extra_body={"training": {"zero_stage": 3}, "resources": {"gpus": 1}, "priority": 5},
    )
    assert (job.object, job.status, job.seed, job.metadata) == ("fine_tuning.job", "queued", 7, {"run": "a"})
    assert job.organization_id == team.id
    assert (job.finished_at, job.error, job.fine_tuned_model, job.trained_tokens) == (None,) * 4
    assert (job.result_files, job.integrations, job.estimated_finish) == ([], [], None)
    assert job.hyperparameters.n_epochs == 2
    assert job.hyperparameters.learning_rate_multiplier == 0.3
    assert isinstance(job.hyperparameters.batch_size, int)
    assert job.method is not None
    assert job.method.supervised is not None
    body = http.get(f"/v1/fine_tuning/jobs/{job.id}").json()
    assert body.keys() == JOB_KEYS | NATIVE_KEYS
    assert body["resolved_config"]["training"]["zero_stage"] == 3
    assert body["progress"] == {
        "step": 0, "total_steps": None, "epoch": None, "tokens_per_second": None, "eta": None,
        "prepared": None,
    }  # fmt: skip
    assert (body["priority"], body["attempts"], body["resources"]) == (5, 0, {"gpus": 1})
    assert openai.fine_tuning.jobs.retrieve(job.id) == job


TURN = b'[{"role": "%s", "content": "x"}]'
PAIRS = (
    b'{"input": {"messages": %s}, "preferred_output": %s, "non_preferred_output": %s}\n'
    % (TURN % b"user", TURN % b"assistant", TURN % b"assistant")
) * 12


def test_a_dpo_job_is_what_the_sdk_models(openai: OpenAI, http: httpx.Client) -> None:
    pairs = openai.files.create(file=("pairs.jsonl", PAIRS), purpose="fine-tune")
    job = openai.fine_tuning.jobs.create(
        model="tiny",
        training_file=pairs.id,
        method={"type": "dpo", "dpo": {"hyperparameters": {"beta": 0.3, "learning_rate_multiplier": 2}}},
    )
    assert job.status == "queued"
    assert job.method is not None
    assert job.method.to_dict(exclude_unset=True) == {
        "type": "dpo",
        "dpo": {
            "hyperparameters": {
                "beta": 0.3, "n_epochs": 3, "batch_size": 8, "learning_rate_multiplier": 2.0,
            }
        },
    }  # fmt: skip
    assert job.method.dpo is not None
    assert job.method.dpo.hyperparameters is not None
    assert job.method.dpo.hyperparameters.beta == 0.3
    assert openai.fine_tuning.jobs.retrieve(job.id) == job
    training = http.get(f"/v1/fine_tuning/jobs/{job.id}").json()["resolved_config"]["training"]
    assert (training["method"], training["dpo"]) == ("dpo", {"beta": 0.3})
    assert training["learning_rate"] == 2e-6
    auto = openai.fine_tuning.jobs.create(
        model="tiny",
        training_file=pairs.id,
        method={"type": "dpo", "dpo": {"hyperparameters": {"beta": "auto", "n_epochs": "auto"}}},
    )
    assert auto.method is not None
    assert auto.method.dpo is not None
    assert auto.method.dpo.hyperparameters is not None
    assert auto.method.dpo.hyperparameters.beta == 0.1


def test_a_lora_job_by_extra_body(openai: OpenAI, http: httpx.Client, training_file: str) -> None:
    lora = {"r": 8, "target_modules": ["q_proj", "v_proj"], "quantization": "nf4"}
    job = openai.fine_tuning.jobs.create(
        model="tiny", training_file=training_file, extra_body={"training": {"lora": lora}}
    )
    assert job.method is not None
    assert job.method.type == "supervised"
    assert job.hyperparameters.learning_rate_multiplier == 1
    training = http.get(f"/v1/fine_tuning/jobs/{job.id}").json()["resolved_config"]["training"]
    assert training["learning_rate"] == 1e-4
    assert training["lora"] == lora | {
        "alpha": 32.0, "exclude_modules": [], "modules_to_save": [], "use_rslora": False, "merge": False,
    }  # fmt: skip
    for wrong, field in ((True, "training.lora"), ({"r": "8"}, "training.lora.r")):
        with pytest.raises(sdk.BadRequestError) as refused:
            openai.fine_tuning.jobs.create(
                model="tiny", training_file=training_file, extra_body={"training": {"lora": wrong}}
            )
        assert refused.value.param == field
    with pytest.raises(sdk.UnprocessableEntityError) as unknown:
        openai.fine_tuning.jobs.create(
            model="tiny", training_file=training_file, extra_body={"training": {"lora": {"alpa": 1}}}
        )
    assert unknown.value.param == "training.lora.alpa"
    assert "'alpha'" in unknown.value.message


def test_an_adapter_is_listed_with_its_base_and_no_job_starts_from_it(
    openai: OpenAI, http: httpx.Client, server: Server, team: TeamOfTest, training_file: str
) -> None:
    name = f"ft:tiny:{team.name}:mine:adapter"
    with server.sessions.begin() as session:
        session.add(Model(id=name, team_id=team.id, kind="adapter", path="/exports/mine", base_model="tiny"))
    body = http.get(f"/v1/models/{name}").json()
    assert (body["kind"], body["base_model"]) == ("adapter", "tiny")
    with pytest.raises(sdk.UnprocessableEntityError) as refused:
        openai.fine_tuning.jobs.create(model=name, training_file=training_file)
    assert refused.value.param == "model"
    assert "merge" in refused.value.message


def test_a_job_on_a_bad_file_fails_and_names_the_file_and_the_line(openai: OpenAI) -> None:
    bad = openai.files.create(file=("bad.jsonl", b'{"messages": []}\nnot json\n'), purpose="fine-tune")
    assert bad.status == "error"
    job = openai.fine_tuning.jobs.create(model="tiny", training_file=bad.id)
    assert job.status == "failed"
    assert job.error is not None
    assert (job.error.code, job.error.param) == ("invalid_training_file", "training_file")
    assert "line 1" in job.error.message.lower()
    assert job.finished_at is not None
    levels = [event.level for event in openai.fine_tuning.jobs.list_events(job.id)]
    assert levels == ["error", "info"]


def test_what_of_a_file_is_not_used_is_told_by_the_file_and_by_its_jobs(
    openai: OpenAI, http: httpx.Client, tmp_path: Path
) -> None:
    path = write_chat_file(tmp_path / "train.jsonl", 12)
    content = path.read_bytes().replace(b'{"messages"', b'{"source": "x", "messages"')
    file = openai.files.create(file=("train.jsonl", content), purpose="fine-tune")
    warning = "the column 'source' is not used (12 lines, the first is 1)"
    body = http.get(f"/v1/files/{file.id}").json()
    assert (body["status"], body["format"], body["examples"]) == ("processed", "chat", 12)
    assert body["warnings"] == [warning]
    job = openai.fine_tuning.jobs.create(model="tiny", training_file=file.id, validation_file=file.id)
    warnings = http.get(f"/v1/fine_tuning/jobs/{job.id}").json()["warnings"]
    assert [w for w in warnings if "column" in w] == [
        f"training_file: {warning}",
        f"validation_file: {warning}",
    ]


def test_a_file_of_another_method_fails_the_job(openai: OpenAI) -> None:
    file = openai.files.create(file=("pairs.jsonl", PAIRS), purpose="fine-tune")
    assert file.status == "processed"
    job = openai.fine_tuning.jobs.create(model="tiny", training_file=file.id)
    assert (job.status, job.error and job.error.param) == ("failed", "training_file")
    assert "use dpo" in str(job.error and job.error.message)


def test_jobs_are_paged_by_the_sdk_itself(openai: OpenAI, training_file: str) -> None:
    made = [
        openai.fine_tuning.jobs.create(model="tiny", training_file=training_file, seed=seed).id
        for seed in range(7)
    ]
    first = openai.fine_tuning.jobs.list(limit=3)
    assert first.has_more
    assert [job.id for job in openai.fine_tuning.jobs.list(limit=3)] == made[::-1]
    with pytest.raises(sdk.BadRequestError) as refused:
        openai.fine_tuning.jobs.list(after="ftjob-unknown")
    assert refused.value.param == "after"


def test_jobs_are_found_by_metadata(openai: OpenAI, training_file: str) -> None:
    jobs = {
        name: openai.fine_tuning.jobs.create(
            model="tiny", training_file=training_file, metadata={"name": name, "kind": "letter"}
        ).id
        for name in ("a", "b")
    }
    assert [job.id for job in openai.fine_tuning.jobs.list(metadata={"name": "b"})] == [jobs["b"]]
    both = openai.fine_tuning.jobs.list(metadata={"kind": "letter"})
    assert {job.id for job in both} == set(jobs.values())
    assert openai.fine_tuning.jobs.list(metadata={"name": "a", "kind": "digit"}).data == []


def test_events_and_checkpoints_are_paged_over_three_pages(
    openai: OpenAI, server: Server, training_file: str
) -> None:
    job = openai.fine_tuning.jobs.create(model="tiny", training_file=training_file)
    with server.sessions.begin() as session:
        for step in range(1, 8):
            session.add(Event(job_id=job.id, type="metrics", message=f"Step {step}", data={"step": step}))
            session.add(
                Checkpoint(
                    id=f"ftckpt_{job.id}-{step}",
                    job_id=job.id,
                    epoch=1,
                    step=step,
                    path=f"/checkpoints/{step}",
                    manifest_sha256="0",
                    bytes=1,
                    metrics={"train_loss": 1 / step, "valid_loss": None},
                )
            )
    events = list(openai.fine_tuning.jobs.list_events(job.id, limit=3))
    assert [event.message for event in events][:-1] == [f"Step {step}" for step in range(7, 0, -1)]
    assert events[0].id.startswith("ftevent-")
    assert events[0].data == {"step": 7}
    checkpoints = openai.fine_tuning.jobs.checkpoints.list(job.id, limit=3)
    assert checkpoints.model_extra == {"object": "list"} | {
        "first_id": checkpoints.data[0].id,
        "last_id": checkpoints.data[-1].id,
    }
    found = list(checkpoints)
    assert [checkpoint.step_number for checkpoint in found] == [7, 6, 5, 4, 3, 2, 1]
    assert found[5].metrics.train_loss == 0.5
    assert found[0].fine_tuned_model_checkpoint.endswith(":ckpt-step-7")


def test_the_results_of_a_job_are_read_plain_and_in_base64(
    openai: OpenAI, server: Server, http: httpx.Client, training_file: str
) -> None:
    job_id = openai.fine_tuning.jobs.create(model="tiny", training_file=training_file).id
    with server.sessions.begin() as session:
        job = session.get_one(Job, job_id)
        for step in range(1, 60):
            session.add(Metric(job_id=job_id, step=step, epoch=1, train_loss=1 / step))
        session.flush()
        job.result_file = write_results(session, server.settings, job)
        job.state = State.SUCCEEDED
    (file_id,) = openai.fine_tuning.jobs.retrieve(job_id).result_files
    assert openai.files.retrieve(file_id).purpose == "fine-tune-results"
    plain = openai.files.content(file_id)
    assert plain.text.splitlines()[:2] == [",".join(COLUMNS), "1,1.0,,,"]
    encoded = http.get(f"/v1/files/{file_id}/content", params={"encoding": "base64"})
    assert base64.b64decode(encoded.content, validate=True) == plain.content


def test_a_waiting_job_is_paused_resumed_and_cancelled_at_once(openai: OpenAI, training_file: str) -> None:
    jobs = openai.fine_tuning.jobs
    job_id = jobs.create(model="tiny", training_file=training_file).id
    paused: str = jobs.pause(job_id).status
    assert paused == "paused"
    assert jobs.resume(job_id).status == "queued"
    cancelled = jobs.cancel(job_id)
    assert cancelled.status == "cancelled"
    assert cancelled.error is None
    for verb in (jobs.cancel, jobs.pause, jobs.resume):
        with pytest.raises(sdk.ConflictError) as refused:
            verb(job_id)
        assert refused.value.response.headers["x-should-retry"] == "false"


def test_models_are_listed_shown_and_deleted(openai: OpenAI, server: Server, team: TeamOfTest) -> None:
    name = f"ft:tiny:{team.name}:mine:12345678"
    with server.sessions.begin() as session:
        session.add(Model(id=name, team_id=team.id, kind="fine_tuned", path="/exports/mine"))
    models = {model.id: model for model in openai.models.list()}
    assert models[name].owned_by == team.id
    assert models["tiny"].owned_by == "shardyard"
    assert openai.models.retrieve(name) == models[name]
    assert openai.models.delete(name).deleted
    with pytest.raises(sdk.NotFoundError) as missing:
        openai.models.retrieve(name)
    assert missing.value.code == "model_not_found"
    with pytest.raises(sdk.ConflictError):
        openai.models.delete("tiny")


def test_a_model_name_with_a_slash_is_one_name(
    openai: OpenAI, http: httpx.Client, team: TeamOfTest, base_model: Path
) -> None:
    name = f"{team.name}/tiny"
    added = http.post("/v1/models", json={"id": name, "path": str(base_model)})
    assert added.status_code == 200, added.text
    assert added.json()["parameters"] == 128
    assert openai.models.retrieve(name).id == name


def test_each_refusal_is_the_sdk_error_of_its_kind(
    openai: OpenAI, server: Server, training_file: str
) -> None:
    jobs = openai.fine_tuning.jobs
    with pytest.raises(sdk.NotFoundError):
        jobs.retrieve("ftjob-none")
    with pytest.raises(sdk.NotFoundError) as model:
        jobs.create(model="none", training_file=training_file)
    assert (model.value.param, model.value.code) == ("model", "model_not_found")
    with pytest.raises(sdk.NotFoundError) as file:
        jobs.create(model="tiny", training_file="file-none")
    assert file.value.param == "training_file"
    with pytest.raises(sdk.UnprocessableEntityError) as unknown:
        jobs.create(model="tiny", training_file=training_file, extra_body={"traning": {}})
    assert "'training'" in unknown.value.message
    with pytest.raises(sdk.UnprocessableEntityError) as method:
        jobs.create(model="tiny", training_file=training_file, method={"type": "reinforcement"})
    assert method.value.param == "method.type"
    with pytest.raises(sdk.AuthenticationError):
        openai.with_options(api_key="sk-sy-wrong").models.list()
    with pytest.raises(sdk.BadRequestError) as purpose:
        openai.files.create(file=("a.jsonl", b"{}"), purpose="assistants")
    assert purpose.value.param == "purpose"
    with pytest.raises(sdk.NotFoundError) as grader:
        openai.fine_tuning.alpha.graders.validate(grader={"type": "x"})  # type: ignore[arg-type]
    assert grader.value.type == "invalid_request_error"


def test_a_retry_finds_the_job_that_the_first_try_made(
    openai: OpenAI, http: httpx.Client, server: Server, team: TeamOfTest, training_file: str
) -> None:
    body = {"model": "tiny", "training_file": training_file}

    def post(**headers: str) -> httpx.Response:
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        return http.post("/v1/fine_tuning/jobs", json=body, headers=sent)

    first = post().json()["id"]
    assert post(x_stainless_retry_count="1").json()["id"] == first
    assert post(x_stainless_retry_count="0").json()["id"] != first
    keyed = post(idempotency_key="k1").json()["id"]
    assert post(idempotency_key="k1").json()["id"] == keyed
    body["suffix"] = "other"
    reused = post(idempotency_key="k1")
    assert reused.status_code == 409
    assert reused.headers["x-should-retry"] == "false"
    with server.sessions.begin() as session:
        assert len(session.scalars(select(Job.id).where(Job.team_id == team.id)).all()) == 3
