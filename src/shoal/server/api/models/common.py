"""What all models share: pages of lists, errors, names."""

from __future__ import annotations

from typing import Annotated, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, StringConstraints

NAME = r"^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$"

Name = Annotated[str, StringConstraints(pattern=NAME)]
Item = TypeVar("Item")


class Given(BaseModel):
    """Something a client sends: an unknown field is an error, not a surprise."""

    model_config = ConfigDict(extra="forbid")


class Page(BaseModel, Generic[Item]):
    """One page of a list. Ask again with `cursor` set to `next` for the rest; null means there is no more."""

    items: list[Item]
    next: str | None = None


class ErrorBody(BaseModel):
    #: A word for programs: unauthorized, not_found, conflict, invalid, infeasible, ... (docs/api.md)
    code: str
    #: One line for people.
    message: str
    #: What to do about it, where there is something to do.
    hint: str | None = None
    #: Which field of the request, where one is to blame: `spec.gpus`.
    field: str | None = None


class Error(BaseModel):
    error: ErrorBody

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "error": {
                    "code": "not_found",
                    "message": "there is no job 'resnet'",
                    "hint": "`shoal ps -a` lists the jobs you may see",
                }
            }
        }
    )
