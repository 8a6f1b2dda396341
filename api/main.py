"""The HTTP service: ``uvicorn api.main:app``. Wires the parts and holds no logic."""

from typing import Any

from fastapi import FastAPI

from api import document, errors
from api.routes import files, health, jobs, models, reports
from api.schemas.errors import ErrorBody
from api.transport import RequestId, SizeLimit
from jobs.settings import settings


class Service(FastAPI):
    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            self.openapi_schema = document.document(self)
        return self.openapi_schema


def create_app() -> FastAPI:
    app = Service(
        title="Shardyard",
        description="Fine-tuning on your own GPUs, in OpenAI's protocol.",
        version="0.1.0",
        redirect_slashes=False,
        # The document is a route of ours, behind a key like the others.
        openapi_url=None,
        responses={
            "4XX": {"model": ErrorBody, "description": "The request is refused."},
            "5XX": {"model": ErrorBody, "description": "The server failed."},
        },
    )
    errors.install(app)
    for routes in (files, jobs, reports, models, health):
        app.include_router(routes.router)
    app.add_middleware(SizeLimit, upload_limit=lambda: settings().max_upload_bytes)
    app.add_middleware(RequestId)
    return app


app = create_app()
