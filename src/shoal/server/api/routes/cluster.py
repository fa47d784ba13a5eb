"""The cluster as a whole: status, health, shares, policy, what-if, metrics, and shutdown."""

from __future__ import annotations

import ipaddress
from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4

from shoal.server.api import models as m
from shoal.server.api.routes.common import ERRORS, S, W, get_services, get_who, seconds
from shoal.server.services.errors import Infeasible, Unauthorized

router = APIRouter(tags=["cluster"], responses=ERRORS)
outside = APIRouter(include_in_schema=False)


@router.get("/status", response_model=m.Status)
async def status(s: S, who: W) -> m.Status:
    """What is in force."""
    return s.status.show(who.user, who.role.value, who.only)


@router.get("/doctor", response_model=m.Doctor)
async def doctor(s: S, who: W) -> m.Doctor:
    """What is in order, what is not, and what to do about it."""
    return await s.status.doctor()


@router.get("/shares", response_model=m.ShareList)
async def shares(
    s: S,
    who: W,
    since: Annotated[
        datetime | None,
        Query(description="From the last sample before this time; from the beginning if left out."),
    ] = None,
) -> m.ShareList:
    """The fairness ledger: GPU time that each user was due, got, lent and borrowed. Samples are hourly or rarer."""
    found = s.shares.show(seconds(since))
    if who.only is not None:
        # A share means nothing without the shares of the others, so users see all; but not the others' jobs.
        for line in found.items:
            if line.user != who.user:
                line.running_jobs = line.pending_jobs = None
    return found


@router.get("/policy", response_model=m.Policy)
async def get_policy(s: S, who: W) -> m.Policy:
    """The policy in force, and the available ones."""
    return s.policy.show()


@router.put("/policy", response_model=m.Policy)
async def set_policy(choice: m.PolicySet, s: S, who: W) -> m.Policy:
    """Decide by another policy from now on, without a restart."""
    who.must_administer()
    await s.policy.set(choice.name, choice.options, who.user)
    return s.policy.show()


@router.post("/plan", response_model=m.PlanOutcome)
async def plan(request: m.PlanRequest, s: S, who: W) -> m.PlanOutcome:
    """What would happen if this job were submitted now. Nothing changes."""
    spec = request.spec
    try:
        size = await s.submit.auto_gpus(spec, who.user)
        if size is not None:
            spec = spec.model_copy(update={"gpus": str(size.gpus)})
        s.submit.range_of(spec)
    except Infeasible as error:
        reason = m.Reason(code="Infeasible", sentence=str(error))
        return m.PlanOutcome(verdict="infeasible", gpus=0, reason=reason, sentence=str(error))
    outcome = s.what_if.plan(spec, who.user, who.sees_all)
    if size is None:
        return outcome
    return outcome.model_copy(update={"sentence": f"{outcome.sentence}; GPUs: {size.why}"})


@router.post("/shutdown", status_code=202)
async def shutdown(s: S, who: W, how: m.Shutdown | None = None) -> dict[str, str]:
    """End the server. Jobs release their GPUs first, or run on without it."""
    who.must_administer()
    jobs = (how or m.Shutdown()).jobs
    s.shut_down(jobs == "stop")
    return {"status": "stopping", "jobs": jobs}


@outside.get("/healthz")
async def health() -> dict[str, str]:
    return {"status": "ok"}


@outside.get("/metrics")
async def metrics(request: Request) -> Response:
    """For Prometheus; from another machine or through a proxy with a token."""
    if not _is_local(request) or "x-forwarded-for" in request.headers or "forwarded" in request.headers:
        await get_who(request)
    s = await get_services(request)
    return Response(s.metrics.text(await s.gauges.collect()), media_type=CONTENT_TYPE_PLAIN_0_0_4)


def _is_local(request: Request) -> bool:
    try:
        return request.client is not None and ipaddress.ip_address(request.client.host).is_loopback
    except ValueError:
        raise Unauthorized from None
