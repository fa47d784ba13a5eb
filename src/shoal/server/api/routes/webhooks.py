"""Webhooks: addresses that receive notifications of your jobs."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path

from shoal.server.api import models as m
from shoal.server.api.routes.common import ERRORS, S, W

router = APIRouter(tags=["people"], responses=ERRORS)
WebhookId = Annotated[int, Path(ge=1, le=10**15)]


@router.get("/webhooks", response_model=m.WebhookList)
async def list_webhooks(s: S, who: W) -> m.WebhookList:
    """Your own webhooks, or all for admins."""
    return m.WebhookList(items=s.webhooks.of(None if who.role is m.Role.ADMIN else who.user))


@router.post("/webhooks", status_code=201, response_model=m.WebhookCreated)
async def add_webhook(new: m.WebhookCreate, s: S, who: W) -> m.WebhookCreated:
    """Be told of events of your jobs at a URL. Only this answer contains the key of the signatures."""
    who.must_change()
    return await s.webhooks.add(new, who.user)


@router.delete("/webhooks/{webhook}", status_code=204)
async def delete_webhook(webhook: WebhookId, s: S, who: W) -> None:
    who.must_change()
    s.webhooks.delete(webhook, None if who.role is m.Role.ADMIN else who.user, who.user)


@router.post("/webhooks/{webhook}/test", response_model=m.WebhookTest)
async def test_webhook(webhook: WebhookId, s: S, who: W) -> m.WebhookTest:
    """Send a notification now, and say whether it was accepted."""
    who.must_change()
    return await s.webhooks.test(webhook, None if who.role is m.Role.ADMIN else who.user)
