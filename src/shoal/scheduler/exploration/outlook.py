"""What exploration would measure next of a job, for `shoal profile`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shoal.core.words import counted, spoken
from shoal.policies.base import Policy
from shoal.scheduler.exploration.exploration import Books, Exploration, shares_of
from shoal.scheduler.exploration.trial import AtSize


@dataclass(frozen=True, slots=True)
class Outlook:
    """The size at which a job is measured next, or None; and in words, with the reason."""

    gpus: int | None
    sentence: str


def outlook(
    exploration: Exploration | None, books: Books, policy: Policy, job_id: int, now_s: float
) -> Outlook:
    """What the search for trials would choose for this job, by the shares of now."""
    nothing = _why_nothing(exploration, books, policy, job_id)
    if exploration is None or nothing is not None:
        return Outlook(None, nothing or "")
    view = books.view
    shares = shares_of(books, view.gpus.copy(), np.maximum(view.gpu_type, 0))
    if shares.waits:
        return Outlook(None, "nothing while a job waits for GPUs")
    found = exploration.best(books, shares, now_s, only=job_id)
    member = None if found is None else next(m for m in found.members if m.job_id == job_id)
    if member is None:
        return Outlook(None, _why_none_found(exploration, books, job_id, now_s))
    on = f" of {view.gpu_types[member.gpu_type]}" if member.gpu_type != member.before_type else ""
    return Outlook(
        member.gpus, f"next at {counted(member.gpus, 'GPU')}{on}, if no other measurement is worth more"
    )


def _why_nothing(exploration: Exploration | None, books: Books, policy: Policy, job_id: int) -> str | None:
    """What keeps the job from being measured, whatever is known of it."""
    if exploration is None:
        return "nothing: exploration is off (`shoal up --explore 0.02` turns it on)"
    if not policy.uses_speeds:
        return f"nothing: policy {policy.name} does not decide by speed"
    job, profile, view = books.jobs[job_id], books.profiles[job_id], books.view
    if job.autoscale:
        return "nothing: its autoscaler chooses the sizes at which it is measured"
    row = view.row(job_id)
    gpus = int(view.gpus[row])
    if not gpus:
        return "nothing while it has no GPUs"
    known = profile.uncertain.get(view.gpu_types[view.gpu_type[row]])
    if known is None or gpus >= len(known.samples) or not known.samples[gpus]:
        return f"its present size first, {counted(gpus, 'GPU')}"
    return None


def _why_none_found(exploration: Exploration, books: Books, job_id: int, now_s: float) -> str:
    """Why no size is measured next."""
    view, job = books.view, books.jobs[job_id]
    row = view.row(job_id)
    gpu_type = view.gpu_types[view.gpu_type[row]]
    range_, samples = books.range_of(job_id), books.profiles[job_id].uncertain[gpu_type].samples
    sizes = range(range_.min, min(range_.max, len(samples) - 1) + 1, range_.step)
    unknown = [n for n in sizes if not samples[n]]
    if not unknown:
        return "nothing more: all its sizes were measured"
    tried = exploration.history.tried
    for n in unknown:
        before = tried.get(AtSize(job.model or job.name, gpu_type, n))
        if before is not None and before.not_before_s > now_s:
            what = "a worker failed there" if before.failed else "it was tried just before"
            return f"nothing now: not at {counted(n, 'GPU')} for {spoken(before.not_before_s - now_s)}, as {what}"
    return "nothing now: no measurement is worth what it costs"
