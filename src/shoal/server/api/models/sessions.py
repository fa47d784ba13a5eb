"""Commands next to the workers of a job."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field, StringConstraints

from shoal.server.api.models.common import Given
from shoal.server.api.models.examples import shown


class ExecStart(Given, json_schema_extra=shown({"command": ["nvidia-smi"]})):
    """A command to run next to a worker, in its environment, directory and account."""

    command: list[Annotated[str, StringConstraints(pattern=r"^[^\x00]*$", max_length=64 * 1024)]] = Field(
        min_length=1, max_length=1024
    )
    rank: int | None = Field(
        None, ge=0, le=1_000_000, description="Next to this rank; the first if left out."
    )
    tty: bool = Field(False, description="With a terminal.")
    rows: int = Field(24, ge=1, le=10_000)
    columns: int = Field(80, ge=1, le=10_000)


class ExecStarted(BaseModel, json_schema_extra=shown({"id": "3hT0yVw2m1kQ"})):
    id: str = Field(description="The name of the session.")


class ExecOutput(BaseModel, json_schema_extra=shown({"data": "aGVsbG8K", "next": 6, "exit_code": None})):
    """What the command has printed since `after`."""

    data: str = Field(description="In base64.")
    next: int = Field(description="Pass it as `after` to read on.")
    exit_code: int | None = Field(None, description="When it has ended and all output was read.")


class ExecInput(Given, json_schema_extra=shown({"data": "bHMK"})):
    data: str = Field(max_length=1024 * 1024, description="In base64.")


class ExecSize(Given, json_schema_extra=shown({"rows": 24, "columns": 80})):
    rows: int = Field(ge=1, le=10_000)
    columns: int = Field(ge=1, le=10_000)
