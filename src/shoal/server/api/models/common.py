"""Pages of lists, errors and names, used by all models."""

from __future__ import annotations

from typing import Annotated, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, StringConstraints

NAME = r"^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$"

Name = Annotated[str, StringConstraints(pattern=NAME)]
Item = TypeVar("Item")


class Given(BaseModel):
    """A body that a client sends. Unknown fields are errors, and numbers are finite."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class Page(BaseModel, Generic[Item]):
    """One page of a list. Pass `next` as `cursor` to get the following page; null means that this is the last."""

    items: list[Item]
    next: str | None = None


class ErrorBody(BaseModel):
    #: For programs: unauthorized, not_found, conflict, invalid, infeasible, ... (docs/api.md)
    code: str
    #: One line for people.
    message: str
    #: What to do about it.
    hint: str | None = None
    #: The field of the request that is wrong: `spec.gpus`.
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
