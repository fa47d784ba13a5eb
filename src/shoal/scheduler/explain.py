"""Why a job does not have all it could use, read off the state that the last decision left."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

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
#: Nodes that a reason names.
MOST_NAMED = 3


@dataclass(frozen=True)
class Situation:
    """The state that explanations read, at one moment."""

    view: View
    policy: Policy
    supply: Supply
    cut: dict[int, int]
    decision: Decision | None
    now_s: float

    @cached_property
    def held_gpus(self) -> int:
        return int(self.view.gpus.sum())

    @property
    def free_gpus(self) -> int:
        return self.supply.total_gpus - self.held_gpus

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
    step = int(view.step_gpus[row])
    if step > 1:
        evidence["step_gpus"] = step
    if s.decision is None or row >= len(s.decision.gpus):
        return Reason(Code.PENDING_EVALUATION, "no decision has been made since it arrived", evidence)
    try:
        evidence |= s.policy.evidence(view, row, s.now_s)
    except Exception as error:  # a third-party policy: an error in an explanation must not stop the scheduler
        evidence["evidence_failed"] = f"{type(error).__name__}: {error}"
    if step > 1 and gpus and "next_gpu_gain" in evidence:
        at = int(view.speed_at[view.gpu_type[row], row]) + gpus
        evidence["next_gpu_gain"] = float(view.speeds[at + step] / view.speeds[at]) - 1.0
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
    gain, step = evidence.get("next_gpu_gain"), int(evidence.get("step_gpus", 1))
    more = "one more" if step == 1 else f"{step} more"
    if gain is not None and float(gain) < NO_GAIN:
        return Reason(code, f"{has}; {more} would not make it faster", evidence)
    if 0 < s.free_gpus < step:
        free = counted(s.free_gpus, "is", "are")
        return Reason(code, f"{has}; it takes them in steps of {step}, and only {free} free", evidence)
    if not s.policy.elastic or s.free_gpus > 0:
        return Reason(code, f"{has}; policy {s.policy.name} gives it no more now", evidence)
    if gain is None:
        text = f"{has}; the others are in use, and policy {s.policy.name} leaves them where they are"
        return Reason(code, text, evidence)
    stay = "is worth more where it is" if step == 1 else "are worth more where they are"
    text = f"{has}; {more} would add {100 * float(gain):.0f} % to its speed, and {stay}"
    return Reason(code, text, evidence)


def held_by_autoscaler(job: Job, gpus: int, cap: Capped | None, policy: Policy) -> Reason | None:
    """Why a job that has all the policy would give it has less than its owner allows; None if it has not less."""
    if cap is None or cap.gpus is None or not policy.elastic or not cap.gpus <= gpus < job.gpus.max:
        return None
    evidence: Evidence = {"gpus": gpus, "autoscaler_gpus": cap.gpus, "max_gpus": job.gpus.max}
    return Reason(Code.NOT_WORTH_IT, cap.why, evidence)


def _out_of_use(s: Situation, row: int, need: int) -> tuple[str, int] | None:
    """(names, GPUs) of the lost and drained nodes that the job could run on; None if it could not run with them."""
    cluster, may = s.supply.cluster, s.view.type_max[:, row] > 0
    lost = (s.supply.gpus_of_node < cluster.gpus_of_node) & may[cluster.type_of_node]
    if not lost.any() or int(cluster.gpus_of_type[may].sum()) < need:
        return None
    names = ", ".join(cluster.nodes[i].name for i in np.flatnonzero(lost)[:MOST_NAMED])
    more = int(lost.sum()) - MOST_NAMED
    gpus = int((cluster.gpus_of_node - s.supply.gpus_of_node)[lost].sum())
    return names + (f", and {more} more" if more > 0 else ""), gpus


def _waiting(s: Situation, row: int, code: Code, evidence: Evidence) -> Reason:
    view = s.view
    need = int(view.min_gpus[row] if s.policy.elastic else view.requested_gpus[row])
    usable = int(s.supply.gpus_of_type[view.type_max[:, row] > 0].sum())
    needs = f"it needs {counted(need, 'GPU')}"
    are_free = counted(s.free_gpus, "is", "are") + " free"
    evidence["need_gpus"] = need
    if need > usable:
        out = _out_of_use(s, row, need)
        if out is not None:
            evidence |= {"nodes_out_of_use": out[0], "gpus_out_of_use": out[1]}
            is_ = "is" if "," not in out[0] else "are"
            text = f"{needs}, and {out[0]} with {counted(out[1], 'GPU')} {is_} out of use"
            return Reason(Code.WAITING_FOR_CAPACITY, text, evidence)
        if usable == 0:
            types = (
                ", ".join(t for t, m in zip(view.gpu_types, view.type_max[:, row]) if m > 0) or "its types"
            )
            return Reason(Code.NO_MATCHING_GPU, f"no GPU of {types} is in this cluster", evidence)
        text = f"{needs} at least, and may use {usable} of those that there are"
        return Reason(Code.INFEASIBLE, text, evidence)
    if int(view.job_ids[row]) in s.cut or code == Code.FRAGMENTED or s.free_gpus >= need:
        free = counted(s.free_gpus, "GPU is", "GPUs are")
        text = f"{free} free, but not {need} that it could use together"
        return Reason(Code.FRAGMENTED, text, evidence)
    holders = view.job_ids[view.gpus.nonzero()]
    later = int(np.count_nonzero(holders > view.job_ids[row]))
    if later:
        evidence["jobs_preferred"] = later
        text = (
            f"{needs} and {are_free}; policy {s.policy.name} prefers "
            f"{counted(later, 'job')} that came after it"
        )
        return Reason(Code.BEHIND_OTHERS, text, evidence)
    text = f"{needs} and {are_free}; jobs before it hold {s.held_gpus}"
    return Reason(Code.WAITING_FOR_CAPACITY, text, evidence)
