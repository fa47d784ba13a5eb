"""Run a command next to a worker: start it, read its output, write to its terminal."""

from __future__ import annotations

import base64
from typing import Annotated

from fastapi import APIRouter, Path, Query, Response

from shoal.server.api import models as m
from shoal.server.api.routes.common import ERRORS, JobId, S, W, live_to_change
from shoal.server.services.errors import Invalid

router = APIRouter(tags=["sessions"], responses=ERRORS)
SessionId = Annotated[str, Path(max_length=100)]


@router.post("/jobs/{job}/exec", status_code=201, response_model=m.ExecStarted)
async def start(job: JobId, given: m.ExecStart, s: S, who: W) -> m.ExecStarted:
    """Run a command next to a worker of a running job, in its environment, directory and account."""
    return m.ExecStarted(id=s.sessions.start(live_to_change(s, who, job), given, who.user))


@router.get("/sessions/{session}/output", response_model=m.ExecOutput)
async def output(
    session: SessionId, s: S, who: W, after: Annotated[int, Query(ge=0, le=2**62)] = 0
) -> m.ExecOutput:
    """What the command has printed. Waits some seconds if there is nothing new."""
    data, position, code = await s.sessions.output(session, who.user, after)
    return m.ExecOutput(data=base64.b64encode(data).decode(), next=position, exit_code=code)


@router.post("/sessions/{session}/input", status_code=204)
async def write(session: SessionId, given: m.ExecInput, s: S, who: W) -> Response:
    """Write to the terminal of the command."""
    try:
        data = base64.b64decode(given.data, validate=True)
    except ValueError:
        raise Invalid("data: is not base64", "data") from None
    s.sessions.find(session, who.user).session.write(data)
    return Response(status_code=204)


@router.post("/sessions/{session}/size", status_code=204)
async def resize(session: SessionId, given: m.ExecSize, s: S, who: W) -> Response:
    """The terminal has another size."""
    s.sessions.find(session, who.user).session.resize(given.rows, given.columns)
    return Response(status_code=204)


@router.delete("/sessions/{session}", status_code=204)
async def end(session: SessionId, s: S, who: W) -> Response:
    """End the command."""
    s.sessions.end(session, who.user)
    return Response(status_code=204)
