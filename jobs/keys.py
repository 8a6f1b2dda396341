"""API keys: shown once, stored as a prefix to recognise and a SHA-256 to check."""

import hashlib
import secrets
from dataclasses import dataclass
from typing import Literal

from sqlalchemy import select
from sqlalchemy.orm import Session

from jobs.errors import Forbidden, Unauthenticated
from jobs.ids import new_id
from jobs.tables import ApiKey

Role = Literal["viewer", "member", "admin"]
RANKS: dict[Role, int] = {"viewer": 0, "member": 1, "admin": 2}

PREFIX = "sk-sy-"
SHOWN = len(PREFIX) + 6
"""Characters of a key that may be shown again."""


@dataclass(frozen=True)
class Caller:
    team_id: str
    key_id: str
    role: Role


def create_key(session: Session, team_id: str, name: str, role: Role) -> str:
    """A new key's secret, which is not stored and can't be shown again."""
    secret = PREFIX + secrets.token_urlsafe(32)
    session.add(
        ApiKey(
            id=new_id("key-"),
            team_id=team_id,
            name=name,
            role=role,
            prefix=secret[:SHOWN],
            sha256=_digest(secret),
        )
    )
    session.flush()
    return secret


def authenticate(session: Session, secret: str) -> Caller:
    """Who holds this key. 256 random bits make looking up the digest as safe as comparing it."""
    key = session.scalar(select(ApiKey).where(ApiKey.sha256 == _digest(secret), ApiKey.revoked_at.is_(None)))
    if key is None:
        raise Unauthenticated(
            "Incorrect API key provided. The embedded stack writes a valid one to client.json in its data "
            "directory; an administrator can make another."
        )
    role: Role = key.role  # type: ignore[assignment]
    return Caller(key.team_id, key.id, role)


def require(caller: Caller, role: Role) -> None:
    if RANKS[caller.role] < RANKS[role]:
        raise Forbidden(f"This key has the role {caller.role!r}; this needs {role!r}.")


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
