"""Exploration: the state of all trials, and the step of the scheduler that plans them.

After the policy has decided, trials that are over end, those under way replace the policy's shares of their jobs, and
the most valuable new one begins. A trial takes GPUs only from its own jobs, or idle ones while no job waits. It ends
when its jobs were measured, when its time is up, or when the policy gives its jobs fewer GPUs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from shoal.core.arrays import IntArray
from shoal.core.decision import Decision
from shoal.core.job import Job
from shoal.core.plan import Cause, CauseKind, TrialNote
from shoal.core.profile import Profile
from shoal.core.reason import Code, Reason
from shoal.core.supply import Supply
from shoal.core.view import View
from shoal.core.words import counted
from shoal.scheduler.exploration.budget import Budget
from shoal.scheduler.exploration.candidates import Found, Situation, find
from shoal.scheduler.exploration.trial import Key, Member, Trial
from shoal.scheduler.exploration.worth import Sampling

#: The part of the GPU time that trials may take.
SHARE = 0.02
#: After the n-th trial of the same thing, it is not tried again for AGAIN_S * AGAIN_FACTOR**(n - 1).
AGAIN_S = 120.0
AGAIN_FACTOR = 4.0
#: Trials at one time.
MOST_TRIALS = 8
#: If no trial is worth its cost, the next look comes after so long or when a job is measured, arrives or leaves.
LOOK_AGAIN_S = 300.0
#: With many jobs a search takes milliseconds, so it is made less often: once in a second with 1000 jobs.
LOOK_S_PER_JOB = 0.001


@dataclass(frozen=True, slots=True)
class Books:
    """What exploration needs of the scheduler."""

    view: View
    supply: Supply
    jobs: Mapping[int, Job]
    profiles: Mapping[int, Profile]
    limits: Mapping[int, list[int]]
    has_limits: bool
    cool_down_s: float


@dataclass(slots=True)
class _Tried:
    times: int = 0
    not_before_s: float = 0.0


@dataclass(slots=True)
class Exploration:
    budget: Budget = field(default_factory=lambda: Budget(SHARE))
    sampling: Sampling = field(default_factory=Sampling)
    trials: list[Trial] = field(default_factory=list)
    tried: dict[Key, _Tried] = field(default_factory=dict)
    #: A job failed during a trial of this: it is not measured again.
    failed: set[Key] = field(default_factory=set)
    #: Trials that began or ended since the last plan.
    notes: list[TrialNote] = field(default_factory=list)
    began: int = 0
    #: The number of events at the last look that found nothing, and when to look again.
    _nothing_at: tuple[int, float] = (-1, 0.0)
    _looked_s: float = -np.inf

    # -- the step of the scheduler -----------------------------------------------------------------

    def apply(self, books: Books, decision: Decision, now_s: float, events_seen: int) -> Decision:
        """The decision with the shares of the trials under way."""
        self.budget.settle(now_s, books.supply.total_gpus, sum(t.moved_gpus for t in self.trials))
        gpus = decision.gpus.copy()
        types = np.zeros(len(gpus), np.int32) if decision.gpu_type is None else decision.gpu_type.copy()
        waits = bool(((gpus == 0) & (books.view.min_gpus <= books.supply.total_gpus)).any())
        free = books.supply.gpus_of_type - np.bincount(
            types[gpus > 0], weights=gpus[gpus > 0], minlength=len(books.supply.gpus_of_type)
        ).astype(np.int64)
        released: set[int] = set()
        for trial in list(self.trials):
            over = self._over(trial, books, now_s) or self._displaced(trial, books, gpus, types, free, waits)
            if over:
                self._end(trial, over, books, now_s)
                released |= {m.job_id for m in trial.members}
            else:
                _put(trial.members, books.view, gpus, types, free)
        wake_s = min([decision.wake_s, *(t.until_s for t in self.trials)])
        if not waits and len(self.trials) < MOST_TRIALS:
            wake_s = min(wake_s, self._begin(books, gpus, types, free, released, now_s, events_seen))
        changed = replace(decision, gpus=gpus, wake_s=max(wake_s, np.nextafter(now_s, np.inf)))
        return changed if decision.gpu_type is None else replace(changed, gpu_type=types)

    def _begin(
        self,
        books: Books,
        gpus: IntArray,
        types: IntArray,
        free: IntArray,
        released: set[int],
        now_s: float,
        events_seen: int,
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
        busy = {m.job_id for t in self.trials for m in t.members}
        blocked = {key for t in self.trials for key in t.keys} | self.failed
        situation = Situation(
            books.view, books.jobs, books.profiles, gpus, types, free, books.limits,
            not books.has_limits, self.sampling, lambda key: self._may_try(key, now_s), now_s,
        )  # fmt: skip
        found = find(situation, busy, blocked)
        if found is None:
            self._nothing_at = events_seen, now_s + LOOK_AGAIN_S
            return self._nothing_at[1] if self._waits_to_try(now_s) else np.inf
        ready_s = max(now_s if m.job_id in released else _cooled_s(m, books, now_s) for m in found.members)
        trial = Trial(found.members, found.steps, now_s, now_s + found.limit_s)
        wait_s = self.budget.wait_s(trial.moved_gpus * found.time_s, books.supply.total_gpus)
        if wait_s > 0 or ready_s > now_s:
            return max(ready_s, now_s + wait_s)
        self._start(trial, found, books)
        _put(trial.members, books.view, gpus, types, free)
        return trial.until_s

    def _start(self, trial: Trial, found: Found, books: Books) -> None:
        self.trials.append(trial)
        self.began += 1
        for member in trial.members:
            self._note(
                trial,
                member,
                books,
                began=True,
                why=f"worth {found.value_s:.0f} s, costs {found.cost_s:.0f} s",
            )

    def _may_try(self, key: Key, now_s: float) -> bool:
        if len(key) == 3 and isinstance(key[2], str) and key in self.tried:
            return False  # other GPU types are tried once per model and user
        before = self.tried.get(key)
        return before is None or now_s >= before.not_before_s

    def _waits_to_try(self, now_s: float) -> bool:
        return any(t.not_before_s > now_s for t in self.tried.values())

    def _over(self, trial: Trial, books: Books, now_s: float) -> str | None:
        """Why the trial ends by itself."""
        if any(m.job_id not in books.view for m in trial.members):
            return "a job of it left"
        if all(_is_known(m, books) for m in trial.members):
            return "measured"
        if now_s >= trial.until_s:
            return "no measurement came in time"
        return None

    def _displaced(
        self, trial: Trial, books: Books, gpus: IntArray, types: IntArray, free: IntArray, waits: bool
    ) -> str | None:
        """Why the policy's decision leaves no place for the trial."""
        if waits:
            return "a job waits for GPUs"
        room = free.copy()
        for m in trial.members:
            row, job = books.view.row(m.job_id), books.jobs[m.job_id]
            if not job.gpus.min <= m.gpus <= job.gpus.max or m.gpus % job.gpus.step or gpus[row] == 0:
                return "its range has changed"
            room[types[row]] += gpus[row]
        for m in trial.members:
            room[m.gpu_type] -= m.gpus
        return "the policy needs its GPUs elsewhere" if (room < 0).any() else None

    def _end(self, trial: Trial, why: str, books: Books, now_s: float) -> None:
        self.trials.remove(trial)
        if why not in ("measured", "no measurement came in time"):
            self._end_notes(trial, why, books)
            return  # it may be tried again at once
        for key in trial.keys:
            tried = self.tried.setdefault(key, _Tried())
            tried.times += 1
            tried.not_before_s = now_s + AGAIN_S * AGAIN_FACTOR ** min(tried.times - 1, 8)
        self._end_notes(trial, why, books)

    def _end_notes(self, trial: Trial, why: str, books: Books) -> None:
        for member in trial.members:
            if member.job_id in books.jobs:
                self._note(trial, member, books, began=False, why=why)

    def _note(self, trial: Trial, member: Member, books: Books, *, began: bool, why: str) -> None:
        gpu_type = books.view.gpu_types[member.gpu_type]
        text = f"{sentence(trial, member, books.view.gpu_types)} ({why})"
        if not began:
            text = f"the measurement at {counted(member.gpus, 'GPU')} ended: {why}"
        self.notes.append(TrialNote(member.job_id, began, text, member.gpus, gpu_type, trial.steps))

    def take_notes(self) -> tuple[TrialNote, ...]:
        notes, self.notes = tuple(self.notes), []
        return notes

    def causes(self) -> dict[int, Cause]:
        """By job: why the jobs of trials have another size."""
        return {m.job_id: Cause(CauseKind.MEASURING) for t in self.trials for m in t.members}

    # -- questions ---------------------------------------------------------------------------------

    def is_complete(self, books: Books) -> bool:
        """Whether a trial has what it waited for, so that its end need not wait."""
        return any(
            all(m.job_id in books.jobs and _is_known(m, books) for m in trial.members)
            for trial in self.trials
        )

    def job_failed(self, job_id: int) -> None:
        """A job that failed during a trial is not measured like that again, nor are others of its model."""
        for trial in self.trials:
            member = trial.member(job_id)
            if member is not None and member.key is not None:
                self.failed.add(member.key)

    def reason(self, job_id: int, gpu_types: tuple[str, ...]) -> Reason | None:
        """Why a job has the size of a trial."""
        for trial in self.trials:
            member = trial.member(job_id)
            if member is not None:
                evidence: dict[str, float | int | str] = {
                    "gpus": member.gpus,
                    "gpus_otherwise": member.before_gpus,
                    "steps": trial.steps,
                }
                return Reason(Code.MEASURING, sentence(trial, member, gpu_types), evidence)
        return None

    def figures(self) -> dict[str, float]:
        return {"trials": self.began, "gpu_s": self.budget.spent_gpu_s}

    # -- saved state -------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        b = self.budget
        return {
            "trials": [trial.plain() for trial in self.trials],
            "tried": [[*key, t.times, t.not_before_s] for key, t in self.tried.items()],
            "failed": [list(key) for key in sorted(self.failed, key=str)],
            "budget": [b.left_gpu_s, b.settled_s, b.spent_gpu_s],
            "began": self.began,
        }

    def restore(self, saved: Mapping[str, Any], shift_s: float = 0.0) -> None:
        self.trials = [Trial.from_plain(trial, shift_s) for trial in saved["trials"]]
        self.tried = {
            (model, gpu_type, what): _Tried(times, not_before_s + shift_s)
            for model, gpu_type, what, times, not_before_s in saved["tried"]
        }
        self.failed = {(model, gpu_type, what) for model, gpu_type, what in saved["failed"]}
        left_gpu_s, settled_s, spent_gpu_s = saved["budget"]
        self.budget.left_gpu_s, self.budget.spent_gpu_s = left_gpu_s, spent_gpu_s
        self.budget.settled_s = None if settled_s is None else settled_s + shift_s
        self.began = saved["began"]


def sentence(trial: Trial, member: Member, gpu_types: tuple[str, ...]) -> str:
    """Why a job has the size of a trial, in words."""
    on = f" of {gpu_types[member.gpu_type]}" if member.gpu_type != member.before_type else ""
    size = counted(member.gpus, "GPU")
    if member.is_measured:
        return f"measuring at {size}{on} for {trial.steps} steps: the next decision depends on it"
    return f"it has {size}{on} for {trial.steps} steps while another job is measured: the next decision depends on it"


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


def _put(members: tuple[Member, ...], view: View, gpus: IntArray, types: IntArray, free: IntArray) -> None:
    """Give the jobs of a trial their sizes."""
    for m in members:
        row = view.row(m.job_id)
        free[types[row]] += gpus[row]
        gpus[row], types[row] = m.gpus, m.gpu_type
        free[m.gpu_type] -= m.gpus
