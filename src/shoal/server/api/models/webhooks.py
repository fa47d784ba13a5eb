"""Webhooks: addresses that receive notifications."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from pydantic import BaseModel, Field

from shoal.server.api.models import examples as ex
from shoal.server.api.models.common import Given, Page
from shoal.server.api.models.examples import shown

EventKind = Literal["started", "resized", "preempted", "failed", "finished", "idle"]


class Webhook(BaseModel, json_schema_extra=shown(ex.WEBHOOK)):
    """An address that receives notifications of a user's jobs, and the state of its deliveries."""

    id: int
    user: str
    url: str = Field(description="Without its path, which may be a secret.")
    format: Literal["json", "slack"]
    events: list[EventKind]
    created_at: datetime
    sent: int = 0
    dropped: int = Field(0, description="Events that did not arrive after all attempts.")
    failed_attempts: int = Field(0, description="Attempts for the next event that failed.")
    next_attempt_at: datetime | None = None
    last_error: str | None = None


class WebhookList(Page[Webhook]):
    pass


class WebhookCreate(
    Given, json_schema_extra=shown({"url": "https://example.com/shoal", "events": ["failed"]})
):
    url: str = Field(
        max_length=2000, description="Only addresses on the public internet, unless an admin allows."
    )
    format: Literal["json", "slack"] = "json"
    events: list[EventKind] = Field(["failed", "finished", "idle"], min_length=1, max_length=20)


class WebhookCreated(Webhook, json_schema_extra=shown(ex.WEBHOOK | {"secret": "whsec_..."})):
    secret: str = Field(description="Key of the signatures; shown only this once.")


class WebhookTest(BaseModel, json_schema_extra=shown({"arrived": True, "message": "it was accepted"})):
    arrived: bool
    message: str
