"""The HTTP service: ``uvicorn api.main:app``. Wires the parts and holds no logic."""

from fastapi import FastAPI

from api import errors
from api.routes import files, health, jobs, models
from api.transport import BodyLimit, RequestId
from jobs.settings import settings


def create_app() -> FastAPI:
    app = FastAPI(
        title="Shardyard",
        description="Fine-tuning on your own GPUs, in OpenAI's protocol.",
        version="0.1.0",
        redirect_slashes=False,
    )
    errors.install(app)
    for routes in (files, jobs, models, health):
        app.include_router(routes.router)
    app.add_middleware(BodyLimit, upload_limit=lambda: settings().max_upload_bytes)
    app.add_middleware(RequestId)
    return app


app = create_app()
