"""The OpenAPI document: what the routes say, and the bodies that they read by themselves."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from api.schemas.models import NewModel
from jobs.spec import JobRequest

REF = "#/components/schemas/{model}"
BODIES: tuple[type[BaseModel], ...] = (JobRequest, NewModel)

UPLOAD_SCHEMA = {
    "type": "object",
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"type": "string", "enum": ["fine-tune"]},
    },
    "required": ["file", "purpose"],
}


def json_body(model: type[BaseModel]) -> dict[str, Any]:
    return _body("application/json", {"$ref": REF.format(model=model.__name__)})


def upload_body() -> dict[str, Any]:
    return _body("multipart/form-data", UPLOAD_SCHEMA)


def _body(media_type: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"requestBody": {"required": True, "content": {media_type: {"schema": schema}}}}


def document(app: FastAPI) -> dict[str, Any]:
    found = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    schemas = found["components"]["schemas"]
    for model in BODIES:
        schema = model.model_json_schema(ref_template=REF)
        added = schema.pop("$defs", {}) | {model.__name__: schema}
        assert not added.keys() & schemas.keys(), "two schemas share a name"
        schemas |= added
    return found
