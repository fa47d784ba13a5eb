"""The cluster as a whole: status, health, shares, the policy, what-if, metrics, and the end of the server."""

from __future__ import annotations

import dataclasses
import ipaddress
import shutil
from datetime import datetime
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4

from shoal import __version__
from shoal.policies.base import Policy
from shoal.policies.registry import policy_classes
from shoal.server.api import models as m
from shoal.server.api.errors import Unauthorized
from shoal.server.api.routes.common import ERRORS, S, Server, W, get_server, get_who, seconds
from shoal.server.api.routes.nodes import node_status
from shoal.server.gauges import gauges
from shoal.server.loop.clock import as_time
from shoal.server.services.auto import size_of
from shoal.server.services.verbs import Infeasible

router = APIRouter(tags=["cluster"], responses=ERRORS)
outside = APIRouter(include_in_schema=False)
MUCH_OFF_S = 10.0
LITTLE_DISK_BYTES = 200 * 1024 * 1024


@router.get("/status", response_model=m.Status)
async def status(s: S, who: W) -> m.Status:
    """What is in force."""
    c = s.conductor
    virtual = any(n.virtual for n in c.nodes)
    warnings = list(c.warnings)
    if virtual:
        why = getattr(c.executor, "why_virtual", "")
        warnings.append("the GPUs are virtual: jobs run on the CPU" + (f" ({why})" if why else ""))
    if c.outbox.trouble:
        warnings.append(c.outbox.trouble)
    return m.Status(
        version=__version__,
        home=str(s.home.path),
        pid=s.pid,
        address=s.address,
        started_at=as_time(s.started_s),
        executor=c.executor.name,
        virtual=virtual,
        policy=c.policy_name,
        policy_options=dataclasses.asdict(c.scheduler.policy.options),
        policy_given=c.policy_options,
        share=c.sharing.guests is not None,
        pre_schedule=c.sharing.early is not None,
        store="sqlite" if s.store.kind == "sqlite" else "postgresql",
        nodes=[node_status(s, i) for i in range(len(c.nodes))],
        total_gpus=c.cluster.total_gpus,
        used_gpus=c.devices.used,
        jobs=s.store.count_jobs(who.only),
        user=who.user,
        role=who.role.value,
        warnings=warnings,
        last_event=s.store.last_event()[0],
    )


@router.get("/doctor", response_model=m.Doctor)
async def doctor(s: S, who: W) -> m.Doctor:
    """What is in order, what is not, and what to do about it."""
    checks = [
        *_gpu_checks(s),
        _store_check(s),
        _disk_check(s),
        _clock_check(s),
        *_loop_checks(s),
        _torch_check(),
    ]
    return m.Doctor(healthy=all(c.status != "error" for c in checks), checks=checks)


def _gpu_checks(s: Server) -> list[m.Check]:
    c = s.conductor
    total = c.cluster.total_gpus
    if not any(n.virtual for n in c.nodes):
        return [m.Check(name="gpus", status="ok", message=f"{total} GPUs: {', '.join(c.cluster.gpu_types)}")]
    why = getattr(c.executor, "why_virtual", "") or "as was asked for with --gpus"
    hint = "install the NVIDIA driver, or go on with virtual GPUs" if "driver" in why else None
    text = f"{total} virtual GPUs, jobs run on the CPU: {why}"
    return [m.Check(name="gpus", status="warning" if hint else "ok", message=text, hint=hint)]


def _store_check(s: Server) -> m.Check:
    if s.conductor.outbox.trouble:
        return m.Check(
            name="store", status="error", message=s.conductor.outbox.trouble, hint="it is tried every second"
        )
    size = s.store.size_bytes() / 1e6
    return m.Check(name="store", status="ok", message=f"{s.store.kind}, {size:.1f} MB")


def _disk_check(s: Server) -> m.Check:
    free = shutil.disk_usage(s.home.path).free
    text = f"{free / 2**30:.1f} GiB are free at {s.home.path}"
    if free < LITTLE_DISK_BYTES:
        return m.Check(name="disk", status="warning", message=text, hint="free some space")
    return m.Check(name="disk", status="ok", message=text)


def _clock_check(s: Server) -> m.Check:
    behind_s = s.conductor.clock.behind_s()
    if abs(behind_s) < MUCH_OFF_S:
        return m.Check(name="clock", status="ok", message="as the machine's")
    text = f"the machine's clock was set by {behind_s:+.0f} s since the server started"
    hint = "lengths of time are right, times of day are not: `shoal down --keep-jobs` and `shoal up` set them"
    return m.Check(name="clock", status="warning", message=text, hint=hint)


def _loop_checks(s: Server) -> list[m.Check]:
    c = s.conductor
    found = [
        m.Check(name="policy", status="ok", message=f"{c.policy_name}: {c.scheduler.policy.summary}"),
        m.Check(name="jobs", status="ok", message=f"{len(c.jobs)} unfinished, {c.devices.used} GPUs in use"),
    ]
    if c.scheduler.policy.needs_lengths:
        unknown = sum(c.profiles.remaining(j).unknown is not None for j in c.jobs.values())
        if unknown:
            text = f"policy {c.policy_name} needs to know how long jobs take; it assumes so for {unknown}"
            hint = "give iterations or expected_s, or choose a policy that needs no lengths"
            found.append(m.Check(name="lengths", status="warning", message=text, hint=hint))
    found += [m.Check(name="warning", status="warning", message=text) for text in c.warnings[-5:]]
    return found


def _torch_check() -> m.Check:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return m.Check(name="torch", status="ok", message=f"torch {version('torch')}")
    except PackageNotFoundError:
        text = "torch is not installed where the server runs: live jobs start without a warm process"
        return m.Check(name="torch", status="warning", message=text, hint="pip install 'shoal[torch]'")


@router.get("/shares", response_model=m.ShareList)
async def shares(
    s: S,
    who: W,
    since: Annotated[
        datetime | None,
        Query(description="From the last sample before this time; from the beginning if left out."),
    ] = None,
) -> m.ShareList:
    """The fairness ledger: what each user was due, got, lent and borrowed. Samples are an hour apart or more."""
    found = s.answers.shares(seconds(since))
    if who.only is not None:
        # A user sees everyone's share, because one's own means nothing without the others'; but not their jobs.
        for line in found.items:
            if line.user != who.user:
                line.running_jobs = line.pending_jobs = 0
    return found


def _info(name: str, cls: type[Policy]) -> m.PolicyInfo:
    return m.PolicyInfo(name=name, summary=cls.summary, elastic=cls.elastic, needs_lengths=cls.needs_lengths)


def _policy(s: Server) -> m.Policy:
    name = s.conductor.policy_name
    return m.Policy(
        **_info(name, type(s.conductor.scheduler.policy)).model_dump(),
        options=dataclasses.asdict(s.conductor.scheduler.policy.options),
        available=[_info(n, cls) for n, cls in policy_classes().items()],
    )


@router.get("/policy", response_model=m.Policy)
async def get_policy(s: S, who: W) -> m.Policy:
    """The policy in force, and those that could be."""
    return _policy(s)


@router.put("/policy", response_model=m.Policy)
async def set_policy(choice: m.PolicySet, s: S, who: W) -> m.Policy:
    """Decide by another policy from now on, without a restart."""
    who.must_administer()
    s.verbs.set_policy(choice.name, choice.options, who.user)
    return _policy(s)


@router.post("/plan", response_model=m.PlanOutcome)
async def plan(request: m.PlanRequest, s: S, who: W) -> m.PlanOutcome:
    """What would happen if this job were submitted now. Nothing is changed."""
    spec = request.spec
    try:
        size = await size_of(s.conductor, spec, who.user, s.verbs.most_gpus)
        if size is not None:
            spec = spec.model_copy(update={"gpus": str(size.gpus)})
        s.verbs.check_feasible(spec)
    except Infeasible as error:
        reason = m.Reason(code="Infeasible", sentence=str(error))
        return m.PlanOutcome(verdict="infeasible", gpus=0, reason=reason, sentence=str(error))
    outcome = s.answers.reasons.whatif.plan(spec, who.user, who.sees_all)
    if size is None:
        return outcome
    return outcome.model_copy(update={"sentence": f"{outcome.sentence}; GPUs: {size.why}"})


@router.post("/shutdown", status_code=202)
async def shutdown(s: S, who: W, how: m.Shutdown | None = None) -> dict[str, str]:
    """End the server; jobs give their GPUs back first, or run on without it."""
    who.must_administer()
    jobs = (how or m.Shutdown()).jobs
    s.shut_down(jobs == "stop")
    return {"status": "stopping", "jobs": jobs}


@outside.get("/healthz")
async def health() -> dict[str, str]:
    return {"status": "ok"}


@outside.get("/metrics")
async def metrics(request: Request) -> Response:
    """For Prometheus; from another machine with a token."""
    if not _is_local(request):
        await get_who(request)
    s = await get_server(request)
    text = s.conductor.metrics.text(await gauges(s))
    return Response(text, media_type=CONTENT_TYPE_PLAIN_0_0_4)


def _is_local(request: Request) -> bool:
    client: Any = request.client
    try:
        return client is not None and ipaddress.ip_address(client.host).is_loopback
    except ValueError:
        raise Unauthorized from None
