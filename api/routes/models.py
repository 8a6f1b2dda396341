"""Models: what a job may start from."""

from typing import Annotated

from fastapi import APIRouter, Body

from api.access import Admin, Member, Reader
from api.views import View, model_view
from jobs import models
from jobs.database import sessions

router = APIRouter(prefix="/v1/models", tags=["models"])


@router.get("")
def list_models(caller: Reader) -> View:
    with sessions().begin() as session:
        data = [model_view(model) for model in models.list_models(session, caller.team_id)]
    return {"object": "list", "data": data, "has_more": False}


@router.post("")
def add(caller: Admin, id: Annotated[str, Body()], path: Annotated[str, Body()]) -> View:
    """Register a Hugging Face directory on the server as a base model for every team."""
    with sessions().begin() as session:
        return model_view(models.add_base_model(session, id, path))


@router.get("/{model_id:path}")
def show(caller: Reader, model_id: str) -> View:
    with sessions().begin() as session:
        return model_view(models.get_model(session, caller.team_id, model_id))


@router.delete("/{model_id:path}")
def delete(caller: Member, model_id: str) -> View:
    """Forget a fine-tuned model or checkpoint; its files stay where the job left them."""
    with sessions().begin() as session:
        models.delete_model(session, caller.team_id, model_id)
    return {"id": model_id, "object": "model", "deleted": True}
