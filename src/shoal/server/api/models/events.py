"""Events, and lines that jobs print."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from pydantic import BaseModel, Field

from shoal.server.api.models import examples as ex
from shoal.server.api.models.common import Page
from shoal.server.api.models.examples import shown


class Event(BaseModel, json_schema_extra=shown(ex.EVENT)):
    """Something that happened. Events are never changed or removed: they are the audit log."""

    id: int = Field(description="Ascending; the cursor of `GET /events` and the id of server-sent events.")
    at: datetime
    type: str = Field(description="job.submitted, job.started, job.resized, ... (docs/api.md)")
    actor: str = Field(description="User name, or `system` for the scheduler and the executor.")
    job: int | None = None
    job_name: str | None = None
    user: str | None = Field(None, description="Owner of the job.")
    plan: int | None = Field(None, description="Number of the decision that caused it.")
    cause: int | None = Field(None, description="Id of the event that caused it, where one is known.")
    message: str
    data: dict[str, Any] = Field(default_factory=dict)


class EventList(Page[Event]):
    """Oldest first, after `cursor`. `next` is never null: later events follow it."""


class LogLine(BaseModel, json_schema_extra=shown(ex.LOG_LINE)):
    at: datetime
    worker: str
    rank: int | None = None
    text: str
    cursor: str | None = Field(None, description="Resume after this line (only when following).")


class LogPage(Page[LogLine]):
    """Lines of all workers, merged by time. `next` is null after the last line."""
