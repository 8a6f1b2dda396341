"""What every answer has in common: strict shapes, Unix seconds, and OpenAI's lists."""

from datetime import datetime
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict

JsonObject = dict[str, Any]


def _seconds(moment: object) -> object:
    return int(moment.timestamp()) if isinstance(moment, datetime) else moment


Seconds = Annotated[int, BeforeValidator(_seconds)]
"""A moment, as OpenAI's clients read it: whole Unix seconds."""


class Shape(BaseModel):
    """Made from keywords or from a row's attributes; pydantic writes a number that is not finite as null."""

    model_config = ConfigDict(from_attributes=True, frozen=True)


Item = TypeVar("Item")


class List(Shape, Generic[Item]):
    object: Literal["list"] = "list"
    data: list[Item]
    has_more: bool


class Deleted(Shape):
    id: str
    object: str
    deleted: Literal[True] = True
