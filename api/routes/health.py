"""Whether the service is there, and what it offers. Health is all that needs no key."""

from typing import Literal

import redis
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from sqlalchemy import text
from sqlalchemy.exc import OperationalError

from api.access import Reader
from jobs.database import sessions
from jobs.settings import settings

router = APIRouter(tags=["health"])

Answer = Literal["ok", "unreachable"]


class Health(BaseModel):
    status: Literal["ok"] = "ok"


class Readiness(BaseModel):
    status: Literal["ok", "degraded", "unavailable"]
    database: Answer
    broker: Answer


@router.get("/healthz")
def healthz() -> Health:
    """The process answers."""
    return Health()


@router.get("/readyz")
def readyz(response: Response) -> Readiness:
    """The database is needed; without the broker jobs only start a little later."""
    database, broker = _database(), _broker()
    if database != "ok":
        response.status_code = 503
        return Readiness(status="unavailable", database=database, broker=broker)
    return Readiness(status="ok" if broker == "ok" else "degraded", database=database, broker=broker)


@router.get("/v1/openapi.json", include_in_schema=False)
def openapi(caller: Reader, request: Request) -> JSONResponse:
    return JSONResponse(request.app.openapi())


def _database() -> Answer:
    try:
        with sessions().begin() as session:
            session.execute(text("SELECT 1"))
    except OperationalError:
        return "unreachable"
    return "ok"


def _broker() -> Answer:
    try:
        with redis.Redis.from_url(settings().redis_url, socket_timeout=1, socket_connect_timeout=1) as client:
            client.ping()
    except redis.RedisError:
        return "unreachable"
    return "ok"
