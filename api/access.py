"""Who is asking, as a dependency of every route under /v1."""

from typing import Annotated

from fastapi import Depends, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from jobs.database import sessions
from jobs.errors import Unauthenticated
from jobs.keys import Caller, authenticate, require

_bearer = HTTPBearer(auto_error=False, description="An API key.")


def any_key(bearer: Annotated[HTTPAuthorizationCredentials | None, Security(_bearer)]) -> Caller:
    """The holder of a valid key in ``Authorization: Bearer``."""
    if bearer is None or not bearer.credentials:
        raise Unauthenticated(
            "You didn't provide an API key: send it as 'Authorization: Bearer KEY'.", code="missing_api_key"
        )
    with sessions().begin() as session:
        return authenticate(session, bearer.credentials)


def _member(caller: Annotated[Caller, Depends(any_key)]) -> Caller:
    require(caller, "member")
    return caller


def _admin(caller: Annotated[Caller, Depends(any_key)]) -> Caller:
    require(caller, "admin")
    return caller


Reader = Annotated[Caller, Depends(any_key)]
"""May look."""

Member = Annotated[Caller, Depends(_member)]
"""May also change what is the team's."""

Admin = Annotated[Caller, Depends(_admin)]
"""May also change what every team uses."""
