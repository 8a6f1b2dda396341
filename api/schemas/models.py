"""A model as clients see it, and what it takes to add one."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from api.schemas.lists import JsonObject, Seconds, Shape
from jobs.errors import InvalidRequest, Unprocessable
from jobs.tables import Model


class NewModel(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    id: str
    path: str
    """Of a Hugging Face directory on the server."""


def parse_new_model(body: JsonObject) -> NewModel:
    try:
        return NewModel.model_validate(body)
    except ValidationError as error:
        problem = error.errors()[0]
        param = str(problem["loc"][0])
        if problem["type"] == "extra_forbidden":
            raise Unprocessable(
                f"{param}: there is no such field; send id and path", param=param, code="unknown_parameter"
            ) from error
        raise InvalidRequest(f"{param}: {problem['msg']}; send id and path", param=param) from error


class ModelObject(Shape):
    id: str
    object: Literal["model"] = "model"
    created: Seconds
    owned_by: str
    kind: Literal["base", "fine_tuned", "adapter", "checkpoint"]
    parameters: int | None
    path: str
    job_id: str | None
    base_model: str | None
    """Of an adapter: the model that it was trained beside and is loaded over."""


def model_object(model: Model) -> ModelObject:
    return ModelObject(
        id=model.id,
        created=model.created_at,
        owned_by=model.team_id or "shardyard",
        kind=model.kind,
        parameters=model.parameters,
        path=model.path,
        job_id=model.job_id,
        base_model=model.base_model,
    )
