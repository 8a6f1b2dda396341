"""Models: what a job may start from."""

from fastapi import APIRouter

from api.access import Admin, Member, Reader
from api.bodies import AdminJson
from api.document import json_body
from api.schemas.lists import Deleted, List
from api.schemas.models import ModelObject, NewModel, model_object, parse_new_model
from jobs import models
from jobs.database import sessions

router = APIRouter(prefix="/v1/models", tags=["models"])


@router.get("")
def list_models(caller: Reader) -> List[ModelObject]:
    with sessions().begin() as session:
        found = models.list_models(session, caller.team_id)
    return List(data=[model_object(model) for model in found], has_more=False)


@router.post("", openapi_extra=json_body(NewModel))
def add(caller: Admin, body: AdminJson) -> ModelObject:
    """Register a Hugging Face directory on the server as a base model for every team."""
    new = parse_new_model(body)
    with sessions().begin() as session:
        return model_object(models.add_base_model(session, new.id, new.path))


@router.get("/{model_id:path}")
def show(caller: Reader, model_id: str) -> ModelObject:
    with sessions().begin() as session:
        return model_object(models.get_model(session, caller.team_id, model_id))


@router.delete("/{model_id:path}")
def delete(caller: Member, model_id: str) -> Deleted:
    """Forget a fine-tuned model or checkpoint; its files stay where the job left them."""
    with sessions().begin() as session:
        models.delete_model(session, caller.team_id, model_id)
    return Deleted(id=model_id, object="model")
