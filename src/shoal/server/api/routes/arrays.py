"""Arrays and sweeps: submit, show, cancel, pause and resume all jobs of one."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Response

from shoal.server.api import models as m
from shoal.server.api.auth import Who
from shoal.server.api.routes.common import ERRORS, IdempotencyKey, S, Services, W
from shoal.server.store.change import Row

router = APIRouter(tags=["jobs"], responses=ERRORS)
ArrayId = Annotated[str, Path(max_length=100, description="Number or name of an array.", examples=["sweep"])]


@router.post("/arrays", status_code=201, response_model=m.Array, responses={200: {"model": m.Array}})
async def submit_array(
    spec: m.JobSpec, response: Response, s: S, who: W, idempotency_key: IdempotencyKey = None
) -> m.Array:
    """Submit all jobs of an array or a sweep at once: all of them, or none."""
    who.must_change()
    array_id, new = await s.submit.submit_array(spec, who.user, key=idempotency_key, only=who.only)
    response.status_code = 201 if new else 200
    return s.arrays.show(s.arrays.find(str(array_id), None))


@router.get("/arrays/{array}", response_model=m.Array)
async def show_array(array: ArrayId, s: S, who: W) -> m.Array:
    """How many of its jobs are in which state. GET /jobs?array= lists them."""
    return s.arrays.show(s.arrays.find(array, who.only))


@router.post("/arrays/{array}/cancel", response_model=m.Array)
async def cancel_array(array: ArrayId, s: S, who: W, how: m.Cancel | None = None) -> m.Array:
    """Cancel all its unfinished jobs."""
    grace_s = how.grace_s if how else None
    row = _to_change(s, who, array)
    return s.arrays.change(row, lambda job: s.change.cancel(job, who.user, grace_s))


@router.post("/arrays/{array}/pause", response_model=m.Array)
async def pause_array(array: ArrayId, s: S, who: W) -> m.Array:
    """Hold all its unfinished jobs."""
    return s.arrays.change(_to_change(s, who, array), lambda job: s.change.pause(job, who.user))


@router.post("/arrays/{array}/resume", response_model=m.Array)
async def resume_array(array: ArrayId, s: S, who: W) -> m.Array:
    """Release all its paused jobs."""
    return s.arrays.change(_to_change(s, who, array), lambda job: s.change.resume(job, who.user))


def _to_change(s: Services, who: Who, array: str) -> Row:
    who.must_change()
    row = s.arrays.find(array, who.only)
    who.must_change(row["user"])
    return row
