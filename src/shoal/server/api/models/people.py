"""Users, their roles and their tokens."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum

from pydantic import BaseModel, Field

from shoal.server.api.models import examples as ex
from shoal.server.api.models.common import Given, Name, Page
from shoal.server.api.models.examples import shown


class Role(StrEnum):
    VIEWER = "viewer"  # sees all jobs, changes nothing
    USER = "user"  # sees and changes their own jobs
    ADMIN = "admin"  # sees and changes everything


class User(BaseModel, json_schema_extra=shown(ex.USER)):
    name: str
    role: Role
    tickets: float
    created_at: datetime


class UserList(Page[User]):
    pass


class UserCreate(Given, json_schema_extra=shown({"name": "ada", "tickets": 2})):
    name: Name
    role: Role = Role.USER
    tickets: float = Field(1.0, gt=0, le=1e6)


class UserChange(Given, json_schema_extra=shown({"tickets": 3})):
    role: Role | None = None
    tickets: float | None = Field(None, gt=0, le=1e6)


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
