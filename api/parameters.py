"""Query parameters that several lists share."""

from typing import Annotated

from fastapi import Query, Request

from jobs.errors import InvalidRequest

LARGEST_INTEGER = 2**31 - 1
"""Of PostgreSQL's ``integer``."""

After = Annotated[str | None, Query(max_length=255, description="Id of the last item of the page before.")]


def metadata_filter(request: Request) -> dict[str, str]:
    """``metadata[key]=value`` pairs of the query string."""
    wanted = {}
    for name, value in request.query_params.multi_items():
        if name.startswith("metadata[") and name.endswith("]"):
            wanted[name[len("metadata[") : -1]] = value
        elif name.startswith("metadata"):
            raise InvalidRequest(f"{name}: write a filter as metadata[key]=value", param=name)
    return wanted
