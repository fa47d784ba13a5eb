"""Jobs: submit, list, show, change, explain."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Query, Response

from shoal.server.api import models as m
from shoal.server.api.routes.common import (
    ERRORS,
    Cursor,
    IdempotencyKey,
    JobId,
    Limit,
    S,
    W,
    live_to_change,
    number,
    seconds,
)
from shoal.server.services.errors import Invalid
from shoal.server.store.change import ACTIVE_STATES

router = APIRouter(tags=["jobs"], responses=ERRORS)


@router.post("/jobs", status_code=201, response_model=m.Job, responses={200: {"model": m.Job}})
async def submit(
    spec: m.JobSpec, response: Response, s: S, who: W, idempotency_key: IdempotencyKey = None
) -> m.Job:
    """Submit a job. The server answers when the job is in its store; `state` says whether it started."""
    who.must_change()
    job_id, new = await s.submit.submit(spec, who.user, key=idempotency_key, only=who.only)
    response.status_code = 201 if new else 200
    return s.jobs.by_id(job_id, workers=False)


@router.get("/jobs", response_model=m.JobList)
async def list_jobs(
    s: S,
    who: W,
    state: Annotated[str | None, Query(max_length=200, examples=["pending,running"])] = None,
    active: bool = False,
    user: Annotated[str | None, Query(max_length=64)] = None,
    name: Annotated[str | None, Query(max_length=64)] = None,
    since: datetime | None = None,
    label: Annotated[
        list[str] | None, Query(max_length=16, description="`key=value`; all must match.")
    ] = None,
    array: Annotated[str | None, Query(max_length=100, description="Only jobs of this array.")] = None,
    cursor: Cursor = None,
    limit: Limit = 100,
) -> m.JobList:
    """The jobs you may see, newest first."""
    states = list(ACTIVE_STATES) if active else None
    if state is not None:
        asked = [word for word in state.split(",") if word]
        unknown = [word for word in asked if word not in set(m.JobState)]
        if unknown:
            raise Invalid(f"state: there is no state {unknown[0][:40]!r}", "state")
        states = [w for w in asked if states is None or w in states]
    if who.only is not None:
        if user is not None and user != who.only:
            return m.JobList(items=[])
        user = who.only
    items = await s.jobs.page(
        labels=_labels(label or []),
        array=None if array is None else s.arrays.find(array, who.only)["id"],
        states=states,
        user=user,
        name=name,
        since_s=seconds(since),
        before_id=number(cursor),
        limit=limit,
        may_see=who.sees_all,
    )
    return m.JobList(items=items, next=str(items[-1].id) if len(items) == limit else None)


def _labels(given: list[str]) -> dict[str, str]:
    found = {}
    for one in given:
        key, equals, value = one.partition("=")
        if not equals or not re.fullmatch(m.NAME, key) or "\x00" in value:
            raise Invalid(f"label: {one[:40]!r} is not of the form key=value", "label")
        found[key] = value
    return found


@router.get("/jobs/{job}", response_model=m.Job)
async def show(job: JobId, s: S, who: W) -> m.Job:
    """One job with its workers."""
    return s.jobs.describe(s.jobs.find(job, who.only), workers=True, may_see=who.sees_all)


@router.post("/jobs/{job}/cancel", response_model=m.Job)
async def cancel(job: JobId, s: S, who: W, how: m.Cancel | None = None) -> m.Job:
    """Cancel a job. Its workers have `grace_s` seconds to end by themselves."""
    live = live_to_change(s, who, job)
    s.change.cancel(live, who.user, how.grace_s if how else None)
    return s.jobs.by_id(live.id)


@router.post("/jobs/{job}/pause", response_model=m.Job)
async def pause(job: JobId, s: S, who: W) -> m.Job:
    """Hold a job: it releases its GPUs until it is resumed."""
    live = live_to_change(s, who, job)
    s.change.pause(live, who.user)
    return s.jobs.by_id(live.id)


@router.post("/jobs/{job}/resume", response_model=m.Job)
async def resume(job: JobId, s: S, who: W) -> m.Job:
    """Release a paused job."""
    live = live_to_change(s, who, job)
    s.change.resume(live, who.user)
    return s.jobs.by_id(live.id)


@router.post("/jobs/{job}/scale", response_model=m.Job)
async def scale(job: JobId, change: m.Scale, s: S, who: W) -> m.Job:
    """Change the range of GPUs of a job."""
    live = live_to_change(s, who, job)
    s.change.scale(live, change, who.user)
    return s.jobs.by_id(live.id)


@router.post("/jobs/{job}/checkpoint", response_model=m.Job)
async def checkpoint(job: JobId, s: S, who: W) -> m.Job:
    """Ask a live job to save its state at its next step."""
    live = live_to_change(s, who, job)
    s.change.checkpoint(live)
    return s.jobs.by_id(live.id)


@router.get("/jobs/{job}/why", response_model=m.Why)
async def why(
    job: JobId,
    s: S,
    who: W,
    at: Annotated[
        datetime | None, Query(description="Explain its share at this time; now if left out.")
    ] = None,
    preempted: Annotated[
        bool, Query(description="Also which jobs last took GPUs from it, and by which policy.")
    ] = False,
) -> m.Why:
    """Why it has its present share, who is ahead, when it may start, and what would start it now."""
    row = s.jobs.find(job, who.only)
    live = s.jobs.live(row["id"])
    if at is not None:
        answer = s.history.why(row, seconds(at, "at") or 0.0, who.sees_all)
    elif live is not None:
        answer = s.why.why(live, who.sees_all)
    else:
        answer = s.why.over(s.jobs.describe(row))
    if preempted:
        answer.preempted = s.history.preempted(row, who.sees_all)
    return answer


@router.get("/jobs/{job}/profile", response_model=m.Profile)
async def profile(job: JobId, s: S, who: W) -> m.Profile:
    """What is known of its speed by share, and of its remaining work."""
    row = s.jobs.find(job, who.only)
    live = s.jobs.live(row["id"])
    return s.past_profiles.show(s.jobs.describe(row)) if live is None else s.jobs.profile(live)
