"""Models: base models and fine-tuned ones, which a job may start from, adapters, and checkpoints."""

import re
from pathlib import Path
from typing import Any

from sqlalchemy import or_, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from jobs.errors import Conflict, InvalidRequest, NotFound, Unprocessable
from jobs.tables import Job, Model, Team
from zero_core.models.model_files import InvalidModel, check_model_dir

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}")
"""Of a base model: what Hugging Face names look like, without the colons of fine-tuned ones."""

ADAPTER_CONFIG = "adapter_config.json"
"""peft's, in the directory of an adapter that is no whole model."""


def list_models(session: Session, team_id: str) -> list[Model]:
    """Base models and the team's own, newest first."""
    query = select(Model).where(or_(Model.team_id.is_(None), Model.team_id == team_id))
    return list(session.scalars(query.order_by(Model.created_at.desc(), Model.id.desc())))


def get_model(session: Session, team_id: str, model_id: str, param: str = "model") -> Model:
    model = session.get(Model, model_id)
    if model is None or model.team_id not in (None, team_id):
        raise NotFound(
            f"The model {model_id!r} does not exist; `GET /v1/models` lists those that do.",
            param=param,
            code="model_not_found",
        )
    return model


def add_base_model(session: Session, model_id: str, path: str) -> Model:
    """Register a directory on the server. The same path again changes nothing."""
    if not NAME.fullmatch(model_id):
        raise InvalidRequest(
            f"id: {model_id!r} is not a model name: letters, digits, '.', '_', '-' and '/', 128 at most",
            param="id",
        )
    directory = Path(path)
    if not directory.is_absolute():
        raise InvalidRequest(f"path: {path!r} is not absolute", param="path")
    try:
        files = check_model_dir(directory)
    except InvalidModel as error:
        raise InvalidRequest(f"path: {error}", param="path", code=error.code) from error
    session.execute(
        insert(Model)
        .values(id=model_id, kind="base", path=str(directory), parameters=files.parameters)
        .on_conflict_do_nothing()
    )
    model = session.get_one(Model, model_id)
    if model.kind != "base" or model.path != str(directory):
        raise Conflict(f"A model {model_id!r} exists already at another path; choose another id.", param="id")
    return model


def delete_model(session: Session, team_id: str, model_id: str) -> None:
    """Forget a fine-tuned model or checkpoint of the team; its files stay with the job."""
    model = get_model(session, team_id, model_id)
    if model.team_id is None:
        raise Conflict(f"{model_id!r} is a base model that every team uses.")
    session.delete(model)
    session.flush()


def require_startable(model: Model) -> None:
    """A job starts from a whole model."""
    if model.kind == "checkpoint":
        raise Unprocessable(
            f"model: {model.id!r} is a training checkpoint; start from its job's finished model instead",
            param="model",
            code="unsupported_model",
        )
    if model.kind == "adapter":
        raise Unprocessable(
            f"model: {model.id!r} is a LoRA adapter of {model.base_model!r}, not a whole model; train it "
            'again with {"training": {"lora": {"merge": true}}}, whose result a job can start from',
            param="model",
            code="unsupported_model",
        )


def publish_fine_tuned(session: Session, job: Job, path: Path) -> str:
    """Name the result of a job; the name is the job's alone, so a second call changes nothing."""
    name = _name(session, job)
    if not (path / ADAPTER_CONFIG).is_file():
        return _publish(session, job, name, "fine_tuned", path)
    trained = (job.plan or {}).get("parameters")
    return _publish(session, job, name, "adapter", path, parameters=trained, base_model=job.model)


def publish_checkpoint(session: Session, job: Job, step: int, path: Path) -> str:
    return _publish(session, job, checkpoint_name(session, job, step), "checkpoint", path)


def checkpoint_name(session: Session, job: Job, step: int) -> str:
    return f"{_name(session, job)}:ckpt-step-{step}"


def _publish(session: Session, job: Job, model_id: str, kind: str, path: Path, **more: Any) -> str:
    values = {
        "team_id": job.team_id,
        "kind": kind,
        "path": str(path),
        "job_id": job.id,
        "parameters": job.spec["parameters"],
        **more,
    }
    session.execute(
        insert(Model)
        .values(id=model_id, **values)
        .on_conflict_do_update(index_elements=["id"], set_={"path": str(path)})
    )
    return model_id


def _name(session: Session, job: Job) -> str:
    """``ft:{base}:{team}:{suffix}:{short id}``; a job on a fine-tuned model keeps that one's base."""
    base = job.model.split(":")[1] if job.model.startswith("ft:") else job.model
    team = session.get_one(Team, job.team_id).name
    suffix = job.spec["suffix"] or ""
    return f"ft:{base}:{team}:{suffix}:{job.id.removeprefix('ftjob-')[:8]}"
