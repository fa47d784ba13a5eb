"""Sentences and evidence about GPU sharing, for events and for `shoal why`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shoal.core.words import listed
from shoal.executors.base import NodeInfo
from shoal.scheduler.sharing.colocation import Colocation
from shoal.server.api.models import Reason, Resize
from shoal.server.loop.live_job import LiveJob
from shoal.server.loop.sharing.gpu_facts import GpuFacts

MOST_NAMED = 3


class Explanations:
    def __init__(
        self,
        jobs: Mapping[int, LiveJob],
        nodes: Sequence[NodeInfo],
        facts: GpuFacts,
        left_s: Callable[[LiveJob], float | None],
        colocation: Colocation | None,
    ) -> None:
        """`left_s`: the predicted seconds until a job ends; `colocation` is None if jobs are not co-located."""
        self._jobs, self._nodes, self._facts = jobs, nodes, facts
        self._left_s, self._colocation = left_s, colocation

    def joined(self, job: LiveJob, host: LiveJob) -> tuple[str, dict[str, Any]]:
        """The sentence and the evidence of the event that a job gets this host."""
        where = self._where(job, host, host.user == job.user)
        text = f"{'it prepares' if job.prescheduled else 'it is co-located'} {where}"
        return text, self._evidence(job, host)

    def explain(self, job: LiveJob, reason: Reason, may_see: bool, *, is_active: bool) -> Reason:
        """Why the job has no GPU of its own, and on whose GPU it is, or why it is on none.

        `may_see`: the asker may know the names of other users' jobs; `is_active`: the scheduler has the job.
        """
        host = self._jobs.get(job.host) if job.host is not None else None
        if host is not None and job.colocated:
            what = "it prepares" if job.prescheduled else "it runs co-located"
            where = self._where(job, host, may_see or host.user == job.user)
            text = f"{what} {where}, and waits for a GPU of its own: {reason.sentence}"
            return Reason(
                code=reason.code, sentence=text, evidence=reason.evidence | self._evidence(job, host)
            )
        if self._colocation is not None and not job.target_gpus and is_active:
            why_not = _why_not_colocated(self._colocation, job)
            if why_not is not None:
                reason.evidence["sharing"] = why_not
        return reason

    def with_whom(self, job: LiveJob, may_see: bool) -> str:
        """The other jobs on the GPU of a job, for a sentence; empty if there are none."""
        names = [
            _name(other, may_see or other.user == job.user) for other in self._facts.colocated_on_gpus_of(job)
        ]
        return listed(names[:MOST_NAMED], len(names)) if names else ""

    def _where(self, job: LiveJob, host: LiveJob, may_see: bool) -> str:
        own = next((w.device for w in job.workers.values() if w.colocated), None)
        device = self._facts.device_of(host) or own
        at = f"on GPU {device[1]} of {self._nodes[device[0]].name}, " if device is not None else ""
        name = _name(host, may_see)
        return f"{at}where {name} is about to end" if job.prescheduled else f"{at}beside {name}"

    def _evidence(self, job: LiveJob, host: LiveJob) -> dict[str, Any]:
        """The numbers behind the decision."""
        found: dict[str, Any] = {"host": host.id}
        for key in ("pre_s", "gpu_mem_mb") if job.prescheduled else ("gpu_mem_mb", "gpu_util"):
            found |= {key: value} if (value := (job.needs or {}).get(key)) is not None else {}
        if job.prescheduled:
            left_s = self._left_s(host)
            return found | ({"host_ends_in_s": left_s} if left_s is not None else {})
        if self._colocation is not None:
            on_gpu = (host.id, *self._colocation.colocated_with(host.id))
            needs = [need for job_id in on_gpu if (need := self._facts.need(job_id)) is not None]
            found["utilisation"] = sum(need.utilisation for need in needs)
            found["max_utilisation"] = self._colocation.rule.max_utilisation
        return found | {"needs_by": (job.needs or {}).get("basis", "")}


def _why_not_colocated(colocation: Colocation, job: LiveJob) -> str | None:
    if job.resize is Resize.LIVE:
        return "a job that resizes while it trains cannot be co-located"
    return colocation.why_not(job.id)


def _name(job: LiveJob, may_see: bool) -> str:
    return job.name if may_see else f"a job of {job.user}"
