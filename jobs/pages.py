"""Lists by cursor: newest first, and an unknown cursor is an error, never page one."""

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from sqlalchemy import Select, tuple_
from sqlalchemy.orm import InstrumentedAttribute, Session

from jobs.errors import InvalidRequest

Row = TypeVar("Row")


@dataclass(frozen=True)
class Page(Generic[Row]):
    data: list[Row]
    has_more: bool


def page(
    session: Session,
    query: Select[Row],
    keys: tuple[InstrumentedAttribute[Any], ...],
    *,
    after: str | int | None,
    limit: int,
    ascending: bool = False,
) -> Page[Row]:
    """The ``limit`` rows of ``query`` that follow the row ``after``, ordered by ``keys``.

    The last key is the id that ``after`` names; the row must be one of ``query``'s.
    """
    if after is not None:
        cursor = session.execute(query.with_only_columns(*keys).where(keys[-1] == after)).first()
        if cursor is None:
            raise InvalidRequest(f"after: nothing in this list has the id {after!r}", param="after")
        place = tuple_(*keys)
        query = query.where(place > tuple(cursor) if ascending else place < tuple(cursor))
    order = [key.asc() if ascending else key.desc() for key in keys]
    rows = list(session.scalars(query.order_by(*order).limit(limit + 1)))
    return Page(rows[:limit], len(rows) > limit)
