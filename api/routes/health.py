"""Whether the service is there. The only routes that need no key."""

import redis
from fastapi import APIRouter, Response
from sqlalchemy import text
from sqlalchemy.exc import OperationalError

from api.views import View
from jobs.database import sessions
from jobs.settings import settings

router = APIRouter(tags=["health"])


@router.get("/healthz")
def healthz() -> View:
    """The process answers."""
    return {"status": "ok"}


@router.get("/readyz")
def readyz(response: Response) -> View:
    """The database is needed; without the broker jobs only start a little later."""
    database, broker = _database_answers(), _broker_answers()
    response.status_code = 200 if database else 503
    status = "ok" if database and broker else "degraded" if database else "unavailable"
    return {
        "status": status,
        "database": "ok" if database else "unreachable",
        "broker": "ok" if broker else "unreachable",
    }


def _database_answers() -> bool:
    try:
        with sessions().begin() as session:
            session.execute(text("SELECT 1"))
    except OperationalError:
        return False
    return True


def _broker_answers() -> bool:
    try:
        with redis.Redis.from_url(settings().redis_url, socket_timeout=1, socket_connect_timeout=1) as client:
            return bool(client.ping())
    except redis.RedisError:
        return False
