"""Users, their roles and their tokens."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import BaseModel, Field, StringConstraints

from shoal.server.api.models import examples as ex
from shoal.server.api.models.common import Given, Name, Page
from shoal.server.api.models.examples import shown


class Role(StrEnum):
    VIEWER = "viewer"  # sees all jobs, changes nothing
    USER = "user"  # sees and changes their own jobs
    ADMIN = "admin"  # sees and changes everything


#: The name of an account of a machine.
AccountName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_.-]{0,62}\$?$")]


class Limits(Given, json_schema_extra=shown({"max_gpus": 8, "gpu_hours_per_week": 500})):
    """What a user or a group may have at most; null: no limit. In a change, fields that are left out stay."""

    max_gpus: int | None = Field(None, ge=0, le=1_000_000, description="GPUs at once.")
    max_gpus_of_type: dict[Name, Annotated[int, Field(ge=0, le=1_000_000)] | None] | None = Field(
        None,
        max_length=32,
        description="GPUs of a type at once. In a change, types that are left out stay, and null removes one.",
    )
    max_running_jobs: int | None = Field(None, ge=0, le=1_000_000, description="Jobs with GPUs at once.")
    max_waiting_jobs: int | None = Field(
        None,
        ge=1,
        le=1_000_000,
        description="Unfinished jobs without GPUs. A submission beyond that is refused.",
    )
    gpu_hours_per_week: float | None = Field(
        None, ge=0, le=1e9, description="GPU hours from Monday 00:00 UTC to the next."
    )


class LimitsUse(BaseModel):
    """What counts against the limits now."""

    gpus: int = 0
    gpus_of_type: dict[str, int] = Field(default_factory=dict)
    running_jobs: int = 0
    waiting_jobs: int = 0
    gpu_hours_of_week: float = 0.0


class User(BaseModel, json_schema_extra=shown(ex.USER)):
    name: str
    role: Role
    tickets: float
    created_at: datetime
    account: str | None = Field(None, description="Of the machines, under which their jobs run.")
    group: str | None = None
    limits: Limits = Field(default_factory=Limits)
    use: LimitsUse = Field(default_factory=LimitsUse)
    warnings: list[str] = Field(
        default_factory=list,
        description="What the policy in force ignores, and limits below the present use.",
    )


class UserList(Page[User]):
    pass


class UserCreate(Given, json_schema_extra=shown({"name": "ada", "tickets": 2})):
    name: Name
    role: Role = Role.USER
    tickets: float = Field(1.0, gt=0, le=1e6)
    group: Name | None = None
    limits: Limits = Field(default_factory=Limits)
    account: AccountName | None = Field(
        None, description="Of the machines, under which their jobs run. Without one they get no job."
    )
    same_account: bool = Field(
        False, description="Their jobs may run under the server's account, where it does not run as root."
    )
    #: The user is the person who had this name before and may see the jobs of that time.
    same_person: bool = False


class UserChange(Given, json_schema_extra=shown({"tickets": 3})):
    role: Role | None = None
    tickets: float | None = Field(None, gt=0, le=1e6)
    group: Name | Literal[""] | None = Field(None, description="Empty: no group.")
    limits: Limits | None = Field(None, description="Limits that are left out stay; null removes one.")
    account: AccountName | None = Field(None, description="For jobs that start from now on.")


class Group(BaseModel, json_schema_extra=shown(ex.GROUP)):
    """A group of users. Its limits hold for all jobs of its users together."""

    name: str
    tickets: float | None = Field(
        None, description="Divided among the users of the group who have jobs; null: each has their own."
    )
    limits: Limits = Field(default_factory=Limits)
    use: LimitsUse = Field(default_factory=LimitsUse)
    users: list[str] = Field(default_factory=list)
    created_at: datetime
    warnings: list[str] = Field(default_factory=list)


class GroupList(Page[Group]):
    pass


class GroupCreate(Given, json_schema_extra=shown({"name": "vision", "limits": {"max_gpus": 16}})):
    name: Name
    tickets: float | None = Field(None, gt=0, le=1e6)
    limits: Limits = Field(default_factory=Limits)


class GroupChange(Given, json_schema_extra=shown({"tickets": 3})):
    tickets: float | None = Field(None, gt=0, le=1e6, description="null: each user has their own.")
    limits: Limits | None = Field(None, description="Limits that are left out stay; null removes one.")


class Token(BaseModel, json_schema_extra=shown(ex.TOKEN)):
    id: int
    user: str
    label: str
    created_at: datetime
    last_used_at: datetime | None = None
    expires_at: datetime | None = None


class TokenList(Page[Token]):
    pass


class TokenCreate(Given, json_schema_extra=shown({"user": "ada", "label": "laptop"})):
    user: Name | None = Field(None, description="Yourself if left out; only admins make tokens for others.")
    label: str = Field("", max_length=100, pattern=r"^[^\x00-\x1f\x7f]*$")
    expires_in_s: float | None = Field(None, gt=0, le=10 * 365 * 86400)


class TokenCreated(Token, json_schema_extra=shown(ex.TOKEN | {"token": "shoal_..."})):
    token: str = Field(description="Shown only this once; the server keeps its hash.")
