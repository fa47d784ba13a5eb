"""Why a job does not have all it could use, read off the state that the last decision left."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shoal.core.decision import Decision
from shoal.core.events import Capped
from shoal.core.job import Job
from shoal.core.reason import Code, Reason
from shoal.core.supply import Supply
from shoal.core.view import View
from shoal.core.words import counted
from shoal.policies.base import Policy

Evidence = dict[str, float | int | str]
#: A GPU that adds less than this part to a job's speed adds nothing that could be measured.
NO_GAIN = 0.005


@dataclass(frozen=True, slots=True)
class Situation:
    """The state that explanations read."""

    view: View
    policy: Policy
    supply: Supply
    cut: dict[int, int]
    decision: Decision | None
    now_s: float

    @property
    def free_gpus(self) -> int:
        return self.supply.total_gpus - int(self.view.gpus.sum())

    def held(self, job: Job) -> Reason:
        return Reason(Code.HELD, "its owner holds it; `shoal resume` lets it go on", {"job": job.name})


def explain(s: Situation, row: int) -> Reason:
    """The first reason, in order of precedence, that holds for a row below its wish."""
    view = s.view
    job_id, gpus = int(view.job_ids[row]), int(view.gpus[row])
    evidence: Evidence = {
        "gpus": gpus,
        "min_gpus": int(view.min_gpus[row]),
        "max_gpus": int(view.max_gpus[row]),
        "free_gpus": s.free_gpus,
        "active_jobs": len(view),
    }
    if s.decision is None or row >= len(s.decision.gpus):
        return Reason(Code.PENDING_EVALUATION, "no decision has been made since it arrived", evidence)
    try:
        evidence |= s.policy.evidence(view, row, s.now_s)
    except Exception as error:  # a third-party policy: an error in an explanation must not stop the scheduler
        evidence["evidence_failed"] = f"{type(error).__name__}: {error}"
    code = int(s.decision.codes[row]) if s.decision.codes is not None else 0
    if gpus == 0:
        return _waiting(s, row, Code(code), evidence)
    has = f"it has {counted(gpus, 'GPU')}"
    if job_id in s.cut or code == Code.FRAGMENTED:
        text = f"{has}; more are free, but not where it could use them together"
        return Reason(Code.FRAGMENTED, text, evidence)
    return _not_larger(s, Code(code) if code else Code.NOT_WORTH_IT, has, evidence)


def _not_larger(s: Situation, code: Code, has: str, evidence: Evidence) -> Reason:
    """Why a job with GPUs does not have more, if its placement is not the cause."""
    gain = evidence.get("next_gpu_gain")
    if gain is not None and float(gain) < NO_GAIN:
        return Reason(code, f"{has}; one more would not make it faster", evidence)
    if not s.policy.elastic or s.free_gpus > 0:
        return Reason(code, f"{has}; policy {s.policy.name} gives it no more now", evidence)
    if gain is None:
        text = f"{has}; the others are in use, and policy {s.policy.name} leaves them where they are"
        return Reason(code, text, evidence)
    text = f"{has}; one more would add {100 * float(gain):.0f} % to its speed, and is worth more where it is"
    return Reason(code, text, evidence)


def held_by_autoscaler(job: Job, gpus: int, cap: Capped | None, policy: Policy) -> Reason | None:
    """Why a job that has all the policy would give it has less than its owner allows; None if it has not less."""
    if cap is None or cap.gpus is None or not policy.elastic or not cap.gpus <= gpus < job.gpus.max:
        return None
    evidence: Evidence = {"gpus": gpus, "autoscaler_gpus": cap.gpus, "max_gpus": job.gpus.max}
    return Reason(Code.NOT_WORTH_IT, cap.why, evidence)


def _waiting(s: Situation, row: int, code: Code, evidence: Evidence) -> Reason:
    view = s.view
    need = int(view.min_gpus[row] if s.policy.elastic else view.requested_gpus[row])
    usable = int(s.supply.gpus_of_type[view.type_max[:, row] > 0].sum())
    needs = f"it needs {counted(need, 'GPU')}"
    are_free = counted(s.free_gpus, "is", "are") + " free"
    evidence["need_gpus"] = need
    if need > usable:
        if usable == 0:
            types = (
                ", ".join(t for t, m in zip(view.gpu_types, view.type_max[:, row]) if m > 0) or "its types"
            )
            return Reason(Code.NO_MATCHING_GPU, f"no GPU of {types} is in use-able state", evidence)
        text = f"{needs} at least, and may use {usable} of those that there are"
        return Reason(Code.INFEASIBLE, text, evidence)
    later = np.flatnonzero((view.gpus > 0) & (view.job_ids > view.job_ids[row]))
    holding = int(view.gpus.sum())
    if code in (Code.QUOTA_EXHAUSTED, Code.COOL_DOWN):
        return Reason(code, f"the policy {s.policy.name} holds it back", evidence)
    if int(view.job_ids[row]) in s.cut or code == Code.FRAGMENTED or s.free_gpus >= need:
        free = counted(s.free_gpus, "GPU is", "GPUs are")
        text = f"{free} free, but not {need} that it could use together"
        return Reason(Code.FRAGMENTED, text, evidence)
    if len(later):
        evidence["jobs_preferred"] = len(later)
        text = (
            f"{needs} and {are_free}; policy {s.policy.name} prefers "
            f"{counted(len(later), 'job')} that came after it"
        )
        return Reason(Code.BEHIND_OTHERS, text, evidence)
    text = f"{needs} and {are_free}; jobs before it hold {holding}"
    return Reason(Code.WAITING_FOR_CAPACITY, text, evidence)
