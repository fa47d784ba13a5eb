"""Exploration: the state of all trials, and the step of the scheduler that plans them.

After the policy has decided, trials that are over end, those under way replace the policy's shares of their jobs, and
the most valuable new one begins. A trial takes GPUs only from its own jobs, or idle ones while no job waits. It ends
when its jobs were measured, when a worker fails, when its time is up, or when the policy gives its jobs fewer GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from shoal.core.arrays import IntArray
from shoal.core.decision import Decision
from shoal.core.job import GpuRange, Job
from shoal.core.plan import Cause, CauseKind, TrialNote
from shoal.core.profile import Profile
from shoal.core.reason import Code, Reason
from shoal.core.supply import Supply
from shoal.core.view import View
from shoal.core.words import counted, listed
from shoal.scheduler.exploration.budget import Budget
from shoal.scheduler.exploration.candidates import Found, Situation
from shoal.scheduler.exploration.history import History
from shoal.scheduler.exploration.search import find
from shoal.scheduler.exploration.trial import Member, Trial
from shoal.scheduler.exploration.worth import Sampling

#: The part of the GPU time that trials may take.
SHARE = 0.02
#: Trials at one time.
MOST_TRIALS = 8
#: If no trial is worth its cost, the next look comes after so long or when a job is measured, arrives or leaves.
LOOK_AGAIN_S = 300.0
#: With many jobs a search takes milliseconds, so it is made less often: once in a second with 1000 jobs.
LOOK_S_PER_JOB = 0.001
#: The least time to wait until enough GPU time is saved up.
SAVE_S = 1.0


@dataclass(frozen=True, slots=True)
class Books:
    """What exploration needs of the scheduler."""

    view: View
    supply: Supply
    jobs: Mapping[int, Job]
    profiles: Mapping[int, Profile]
    #: The range of a job, as far as the autoscaler and the rule for idle jobs let it grow.
    range_of: Callable[[int], GpuRange]
    limits: Mapping[int, list[int]]
    has_limits: bool
    cool_down_s: float


@dataclass(frozen=True, slots=True)
class _Shares:
    """The policy's decision, with the shares of trials; changed in place."""

    gpus: IntArray
    types: IntArray
    #: By GPU type: GPUs that are idle.
    free: IntArray
    #: Whether a job waits for GPUs.
    waits: bool


@dataclass(frozen=True, slots=True)
class _Ending:
    """Why a trial ends, and whether it counts: else the same may be tried again at once."""

    why: str
    counts: bool = False
    failed_job: int | None = None


@dataclass(slots=True)
class Exploration:
    budget: Budget = field(default_factory=lambda: Budget(SHARE))
    sampling: Sampling = field(default_factory=Sampling)
    trials: list[Trial] = field(default_factory=list)
    history: History = field(default_factory=History)
    #: Trials that began or ended since the last plan.
    notes: list[TrialNote] = field(default_factory=list)
    began: int = 0
    #: The number of events at the last look that found nothing, and when to look again.
    _nothing_at: tuple[int, float] = (-1, 0.0)
    _looked_s: float = -np.inf

    # -- the step of the scheduler -----------------------------------------------------------------

    def apply(self, books: Books, decision: Decision, now_s: float, events_seen: int) -> Decision:
        """The decision with the shares of the trials under way."""
        self._settle(books, now_s)
        types = (
            np.zeros(len(decision.gpus), np.int32) if decision.gpu_type is None else decision.gpu_type.copy()
        )
        shares = shares_of(books, decision.gpus.copy(), types)
        released: set[int] = set()
        for trial in list(self.trials):
            ending = _over(trial, books, now_s) or _displaced(trial, books, shares)
            if ending is not None:
                self._end(trial, ending, books, now_s)
                released |= {m.job_id for m in trial.members}
            else:
                _put(trial.members, books.view, shares)
        wake_s = min([decision.wake_s, *(t.until_s for t in self.trials)])
        if not shares.waits and len(self.trials) < MOST_TRIALS:
            wake_s = min(wake_s, self._begin(books, shares, released, now_s, events_seen))
        changed = replace(decision, gpus=shares.gpus, wake_s=max(wake_s, np.nextafter(now_s, np.inf)))
        return changed if decision.gpu_type is None else replace(changed, gpu_type=types)

    def stop(self, books: Books, why: str, now_s: float) -> None:
        """End all trials: the policy in force has no use for them."""
        if self.trials:
            self._settle(books, now_s)
        for trial in list(self.trials):
            self._end(trial, _Ending(why), books, now_s)

    def _settle(self, books: Books, now_s: float) -> None:
        self.budget.settle(now_s, books.supply.total_gpus, sum(t.moved_gpus for t in self.trials))

    def _begin(
        self, books: Books, shares: _Shares, released: set[int], now_s: float, events_seen: int
    ) -> float:
        """Begin the best trial if it may begin now. Returns when to look again.

        Jobs in `released` were in a trial that has just ended: they are resized now in any case.
        """
        if self._nothing_at[0] == events_seen and now_s < self._nothing_at[1]:
            return self._nothing_at[1]
        next_s = self._looked_s + LOOK_S_PER_JOB * len(books.view)
        if self._looked_s <= now_s < next_s:
            return next_s
        self._looked_s = now_s
        found, total_gpus = self.best(books, shares, now_s), books.supply.total_gpus
        if found is None:
            self._nothing_at = events_seen, now_s + LOOK_AGAIN_S
            return self._nothing_at[1] if self.history.rests(now_s) else np.inf
        ready_s = max(now_s if m.job_id in released else _cooled_s(m, books, now_s) for m in found.members)
        wait_s = self.budget.wait_s(found.gpu_s, total_gpus)
        if wait_s > 0:
            return max(ready_s, now_s + max(wait_s, SAVE_S))
        if ready_s > now_s:
            return ready_s
        trial = Trial(found.members, found.steps, now_s, now_s + found.limit_s)
        self._start(trial, found, books)
        _put(trial.members, books.view, shares)
        return trial.until_s

    def best(self, books: Books, shares: _Shares, now_s: float, only: int | None = None) -> Found | None:
        """The best trial that the budget allows now, else the best that it will ever allow."""
        most_gpu_s = self.budget.most_gpu_s(books.supply.total_gpus)
        found = find(self._situation(books, shares, self.budget.left_gpu_s, now_s, only))
        if found is None and self.budget.left_gpu_s < most_gpu_s:
            found = find(self._situation(books, shares, most_gpu_s, now_s, only))
        return found

    def _situation(
        self, books: Books, shares: _Shares, affordable_gpu_s: float, now_s: float, only: int | None
    ) -> Situation:
        measured_now = {subject for t in self.trials for subject in t.subjects}
        return Situation(
            books.view, books.jobs, books.profiles, shares.gpus, shares.types, shares.free, books.range_of,
            books.limits, not books.has_limits, self.sampling,
            lambda subject: subject not in measured_now and self.history.may_try(subject, now_s),
            {m.job_id for t in self.trials for m in t.members}, affordable_gpu_s, now_s, only,
        )  # fmt: skip

    def _start(self, trial: Trial, found: Found, books: Books) -> None:
        self.trials.append(trial)
        self.began += 1
        why = f"worth {found.value_s:.0f} s, costs {found.cost_s:.0f} s"
        for member in trial.members:
            text = f"{sentence(trial, member, books.view.gpu_types)} ({why})"
            self._note(trial, member, books.view.gpu_types, text, began=True)

    def _end(self, trial: Trial, ending: _Ending, books: Books, now_s: float) -> None:
        self.trials.remove(trial)
        if ending.counts:
            for member in trial.members:
                if member.subject is not None:
                    self.history.add(member.subject, now_s, failed=member.job_id == ending.failed_job)
        for member in trial.members:
            if member.job_id in books.jobs:
                self._note_end(trial, member, books.view.gpu_types, ending.why)

    def _note_end(self, trial: Trial, member: Member, gpu_types: Sequence[str], why: str) -> None:
        text = f"the measurement at {counted(member.gpus, 'GPU')} ended: {why}"
        self._note(trial, member, gpu_types, text, began=False)

    def _note(
        self, trial: Trial, member: Member, gpu_types: Sequence[str], text: str, *, began: bool
    ) -> None:
        gpu_type = gpu_types[member.gpu_type]
        self.notes.append(TrialNote(member.job_id, began, text, member.gpus, gpu_type, trial.steps))

    def take_notes(self) -> tuple[TrialNote, ...]:
        notes, self.notes = tuple(self.notes), []
        return notes

    def causes(self) -> dict[int, Cause]:
        """By job: why the jobs of trials have another size."""
        return {m.job_id: Cause(CauseKind.MEASURING) for t in self.trials for m in t.members}

    def worker_failed(self, job_id: int) -> None:
        """A worker of a job failed. If the job is in a trial, that ends with the next decision."""
        self.trials = [t if t.member(job_id) is None else replace(t, failed_job=job_id) for t in self.trials]

    # -- questions ---------------------------------------------------------------------------------

    def trial_of(self, job_id: int) -> Trial | None:
        return next((t for t in self.trials if t.member(job_id) is not None), None)

    def is_complete(self, books: Books) -> bool:
        """Whether a trial has what it waited for, so that its end need not wait."""
        return any(
            all(m.job_id in books.jobs and _is_known(m, books) for m in trial.members)
            for trial in self.trials
        )

    def reason(self, job_id: int, gpu_types: tuple[str, ...]) -> Reason | None:
        """Why a job has the size of a trial."""
        trial = self.trial_of(job_id)
        member = None if trial is None else trial.member(job_id)
        if trial is None or member is None:
            return None
        evidence: dict[str, float | int | str] = {
            "gpus": member.gpus,
            "gpus_otherwise": member.before_gpus,
            "steps": trial.steps,
        }
        return Reason(Code.MEASURING, sentence(trial, member, gpu_types), evidence)

    def with_failures(self, reason: Reason, job: Job, gpu_type: str) -> Reason:
        """The reason, with the sizes at which workers failed when jobs of this model were measured there."""
        sizes = self.history.failed_sizes(job.model or job.name, gpu_type)
        if not sizes:
            return reason
        text = (
            f"{reason.sentence}; workers failed when it was measured at {listed(list(map(str, sizes)))} GPUs"
        )
        evidence = {**reason.evidence, "failed_gpus": ", ".join(map(str, sizes))}
        return Reason(reason.code, text, evidence)

    def figures(self) -> dict[str, float]:
        return {"trials": self.began, "gpu_s": self.budget.spent_gpu_s}

    # -- saved state -------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        b = self.budget
        return {
            "trials": [trial.plain() for trial in self.trials],
            "tried": self.history.state(),
            "budget": [b.left_gpu_s, b.settled_s, b.spent_gpu_s],
            "began": self.began,
        }

    def restore(
        self,
        saved: Mapping[str, Any],
        types_before: Sequence[str],
        types_now: Sequence[str],
        shift_s: float = 0.0,
    ) -> None:
        """Continue from a saved state. Trials on GPU types that the cluster no longer has end."""
        for plain in saved["trials"]:
            trial = Trial.from_plain(plain, shift_s)
            moved = trial.with_types(types_before, types_now)
            if moved is not None:
                self.trials.append(moved)
                continue
            for member in trial.members:
                self._note_end(trial, member, types_before, "the cluster no longer has its GPUs")
        self.history.restore(saved["tried"], shift_s)
        left_gpu_s, settled_s, spent_gpu_s = saved["budget"]
        self.budget.left_gpu_s, self.budget.spent_gpu_s = left_gpu_s, spent_gpu_s
        self.budget.settled_s = None if settled_s is None else settled_s + shift_s
        self.began = saved["began"]


def sentence(trial: Trial, member: Member, gpu_types: Sequence[str]) -> str:
    """Why a job has the size of a trial, in words."""
    on = f" of {gpu_types[member.gpu_type]}" if member.gpu_type != member.before_type else ""
    size = counted(member.gpus, "GPU")
    if member.is_measured:
        return f"measuring at {size}{on} for {trial.steps} steps: the next decision depends on it"
    return f"it has {size}{on} for {trial.steps} steps while another job is measured: the next decision depends on it"


def shares_of(books: Books, gpus: IntArray, types: IntArray) -> _Shares:
    """Shares by row, the GPUs that they leave idle, and whether a job waits."""
    supply, has = books.supply, gpus > 0
    used = np.bincount(types[has], weights=gpus[has], minlength=len(supply.gpus_of_type)).astype(np.int64)
    waits = bool((~has & (books.view.min_gpus <= supply.total_gpus)).any())
    return _Shares(gpus, types, supply.gpus_of_type - used, waits)


def _over(trial: Trial, books: Books, now_s: float) -> _Ending | None:
    """Why the trial ends by itself."""
    failed = None if trial.failed_job is None else trial.member(trial.failed_job)
    if failed is not None:
        size = counted(failed.gpus, "GPU")
        return _Ending(f"a worker of job {failed.job_id} failed at {size}", True, failed.job_id)
    if any(m.job_id not in books.view for m in trial.members):
        return _Ending("a job of it left")
    if all(_is_known(m, books) for m in trial.members):
        return _Ending("measured", counts=True)
    if now_s >= trial.until_s:
        return _Ending("no measurement came in time", counts=True)
    return None


def _displaced(trial: Trial, books: Books, shares: _Shares) -> _Ending | None:
    """Why the policy's decision leaves no place for the trial."""
    if shares.waits:
        return _Ending("a job waits for GPUs")
    room = shares.free.copy()
    for m in trial.members:
        row, range_ = books.view.row(m.job_id), books.range_of(m.job_id)
        if not range_.min <= m.gpus <= range_.max or m.gpus % range_.step or shares.gpus[row] == 0:
            return _Ending("its range has changed")
        room[shares.types[row]] += shares.gpus[row]
    for m in trial.members:
        room[m.gpu_type] -= m.gpus
    return _Ending("the policy needs its GPUs elsewhere") if (room < 0).any() else None


def _cooled_s(m: Member, books: Books, now_s: float) -> float:
    """When the cool-down of a job is over. One that the policy has just resized begins to cool down now."""
    view, row = books.view, books.view.row(m.job_id)
    is_steady = (view.gpus[row], view.gpu_type[row]) == (m.before_gpus, m.before_type)
    return (float(view.changed_s[row]) if is_steady else now_s) + books.cool_down_s


def _is_known(m: Member, books: Books) -> bool:
    if not m.is_measured:
        return True
    known = books.profiles[m.job_id].uncertain.get(books.view.gpu_types[m.gpu_type])
    return known is not None and m.gpus < len(known.samples) and known.samples[m.gpus] >= m.samples


def _put(members: tuple[Member, ...], view: View, shares: _Shares) -> None:
    """Give the jobs of a trial their sizes."""
    for m in members:
        row = view.row(m.job_id)
        shares.free[shares.types[row]] += shares.gpus[row]
        shares.gpus[row], shares.types[row] = m.gpus, m.gpu_type
        shares.free[m.gpu_type] -= m.gpus
