"""What the routes share: the services, who asks, which job is meant, cursors."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import Depends, Header, Path, Query, Request

from shoal.server.api import models as m
from shoal.server.api.auth import Gate, Who
from shoal.server.api.hub import Hub
from shoal.server.gauges import Gauges
from shoal.server.loop.live_job import LiveJob
from shoal.server.metrics import Metrics
from shoal.server.services.accounts import Accounts
from shoal.server.services.arrays import Arrays
from shoal.server.services.change import ChangeJob
from shoal.server.services.errors import Invalid
from shoal.server.services.events import Events
from shoal.server.services.history import History
from shoal.server.services.job_logs import Logs
from shoal.server.services.jobs import Jobs
from shoal.server.services.join_tokens import JoinTokens
from shoal.server.services.limits_use import LimitsUse
from shoal.server.services.naming import printable
from shoal.server.services.nodes import Nodes
from shoal.server.services.past_profile import PastProfiles
from shoal.server.services.policy import PolicyInForce
from shoal.server.services.reasons import Reasons
from shoal.server.services.sessions import Sessions
from shoal.server.services.shares import Shares
from shoal.server.services.status import Status
from shoal.server.services.submit import Submit
from shoal.server.services.tokens import Tokens
from shoal.server.services.users import Users
from shoal.server.services.webhooks import Webhooks
from shoal.server.services.what_if import WhatIf
from shoal.server.services.why import Why
from shoal.server.services.workdirs import Workdirs

ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": m.Error, "description": text}
    for status, text in (
        (400, "The request cannot be read"),
        (401, "No valid token"),
        (403, "Your role may not do this"),
        (404, "There is none, or you may not see it"),
        (409, "It is not in a state for this"),
        (413, "The body is too large"),
        (422, "The request does not fit the schema, or can never be fulfilled"),
        (429, "Too many requests or streams"),
        (507, "The disk is full; nothing was changed"),
    )
}


@dataclass(frozen=True, slots=True)
class Services:
    """All that a request may need."""

    gate: Gate
    hub: Hub
    metrics: Metrics
    gauges: Gauges
    jobs: Jobs
    logs: Logs
    events: Events
    submit: Submit
    change: ChangeJob
    reasons: Reasons
    why: Why
    what_if: WhatIf
    accounts: Accounts
    sessions: Sessions
    history: History
    past_profiles: PastProfiles
    shares: Shares
    policy: PolicyInForce
    nodes: Nodes
    join_tokens: JoinTokens
    users: Users
    arrays: Arrays
    webhooks: Webhooks
    limits_use: LimitsUse
    tokens: Tokens
    status: Status
    workdirs: Workdirs
    shut_down: Callable[[bool], None]


# Asynchronous, although they wait for nothing: FastAPI would call plain functions in other threads.
async def get_services(request: Request) -> Services:
    services: Services = request.app.state.services
    return services


async def get_who(request: Request) -> Who:
    services = await get_services(request)
    return services.gate.who(request.headers.get("authorization", ""))


S = Annotated[Services, Depends(get_services)]
W = Annotated[Who, Depends(get_who)]
JobId = Annotated[str, Path(max_length=100, description="Number or name of a job.", examples=["17"])]
IdempotencyKey = Annotated[
    str | None, Header(alias="Idempotency-Key", max_length=200, pattern=r"^[\x21-\x7e]+$")
]
Limit = Annotated[int, Query(ge=1, le=1000)]
Cursor = Annotated[str | None, Query(max_length=4000)]


def live_to_change(s: Services, who: Who, job: str) -> LiveJob:
    """An unfinished job that this user may change."""
    who.must_change()
    live = s.jobs.find_live(job, who.only)
    who.must_change(live.user)
    return live


def number(cursor: str | None, what: str = "cursor") -> int | None:
    """A cursor that is a number."""
    if cursor is None or cursor == "":
        return None
    if not (cursor.isascii() and cursor.isdigit() and len(cursor) < 18):
        raise Invalid(f"{what}: the server did not give out {printable(cursor[:40])!r}", what)
    return int(cursor)


def seconds(at: datetime | None, what: str = "since") -> float | None:
    """A time as seconds since 1970. A time without a zone is UTC."""
    if at is None:
        return None
    try:
        found = (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
    except (OverflowError, ValueError):
        raise Invalid(f"{what}: this time is out of range", what) from None
    return found if math.isfinite(found) else 0.0
