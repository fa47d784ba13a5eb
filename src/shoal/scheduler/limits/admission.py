"""Keep jobs that may not run now out of the policy's view, and limit the sizes of those that may.

A policy sees only jobs that may run, each with the sizes that the limits allow. So every policy keeps every limit
without knowing of it. GPUs that a job reserves under a limit and does not get are offered to other jobs under the same
limit in the same decision; see `offer_again`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from shoal.core.arrays import FloatArray, IntArray
from shoal.core.cluster import Cluster
from shoal.core.job import After, Job
from shoal.core.limits import WEEK_S, Limits
from shoal.core.view import View
from shoal.core.view_kernels import INTS
from shoal.policies.base import Policy
from shoal.scheduler.limits.rooms import Bar, Candidate, Room, divide
from shoal.scheduler.limits.weekly_use import WeeklyUse

_USER = INTS.index("user")
#: Limits that other jobs use up and set free again.
_SHARED = ("max_gpus", "max_gpus_of_type", "max_running_jobs")


@dataclass(frozen=True, slots=True)
class NotYet:
    """The job may not run before this time."""

    until_s: float


@dataclass(frozen=True, slots=True)
class Waits:
    """The job waits for the end of another. `never`: that job ended in a way that does not let it run."""

    after: After
    never: bool = False


@dataclass(frozen=True, slots=True)
class Yields:
    """The job did not get the GPUs that its limit allows; smaller jobs under the same limit may use them."""

    need_gpus: int


#: Why a job may not run, or not grow.
Obstacle = Bar | NotYet | Waits | Yields


#: The row of a job outside the view, as `View.park` returns it.
Row = tuple[FloatArray, IntArray]


class Books(Protocol):
    """What admission needs of the scheduler."""

    view: View
    cluster: Cluster
    policy: Policy
    jobs: dict[int, Job]

    def release(self, job_id: int) -> None:
        """Take the GPUs of a job that may not run any more."""

    def most_by_type(self, job_id: int) -> IntArray: ...

    def least_size(self, job_id: int, gpu_type: int) -> int: ...

    def update_limits(self, job_id: int) -> None: ...


class Admission:
    def __init__(self, week_begin_s: float = 0.0) -> None:
        self.use = WeeklyUse(week_begin_s)
        #: Jobs that may not run now.
        self.barred: dict[int, Row] = {}
        #: Why jobs may not run, or have limited sizes.
        self.obstacles: dict[int, Obstacle] = {}
        #: By job, by GPU type: the sizes that limits allow, if they are below what the job could use.
        self.sizes: dict[int, list[int]] = {}
        #: Jobs with conditions besides GPUs.
        self.conditional: set[int] = set()
        #: Jobs that can never run, because a job that they wait for ended otherwise.
        self.never: dict[int, After] = {}
        self._ceilings: dict[int, int] = {}
        self._rooms: list[tuple[Room, set[int]]] = []

    def is_needed(self, cluster: Cluster) -> bool:
        return bool(self.conditional or self.barred or self.sizes or cluster.has_limits)

    def forget(self, job_id: int) -> None:
        """The job has left."""
        for kept in (self.barred, self.obstacles, self.sizes, self.never, self._ceilings):
            kept.pop(job_id, None)
        self.conditional.discard(job_id)

    def ended(self, job_id: int, succeeded: bool, jobs: dict[int, Job]) -> None:
        """Tell the jobs that wait for this one."""
        for other in sorted(self.conditional):
            job = jobs[other]
            waits = [a for a in job.after if a.job_id == job_id]
            for after in waits:
                if not after.when.allows(succeeded):
                    self.never[other] = after
                else:
                    jobs[other] = job = _without(job, after)

    # -- before the policy decides -----------------------------------------------------------------

    def begin(self) -> None:
        """A new decision: all jobs are offered what the limits allow."""
        self._ceilings = {}

    def apply(self, books: Books, now_s: float) -> None:
        """Take jobs that may not run out of the view, put back those that may, and limit sizes."""
        self.obstacles = {}
        blocked = {i: o for i in self.conditional if (o := self._condition(books.jobs[i], i, now_s))}
        candidates = list(self._candidates(books, blocked))
        division = divide(candidates, fair=books.policy.uses_tickets, elastic=books.policy.elastic)
        self.obstacles = {**blocked, **division.bars}
        out = {i for i in (*blocked, *division.bars) if i not in division.sizes}
        for job_id, ceiling in self._ceilings.items():
            if job_id in books.jobs:
                self.obstacles[job_id] = Yields(int(books.jobs[job_id].gpus.min))
                if ceiling == 0:
                    out.add(job_id)
        for job_id in sorted(out):
            if job_id in books.view:
                self.take_out(books, job_id)
        for job_id in sorted(self.barred.keys() - out):
            self._put_back(books, job_id)
        self._limit_sizes(books, division.sizes)

    def _condition(self, job: Job, job_id: int, now_s: float) -> Obstacle | None:
        if job_id in self.never:
            return Waits(self.never[job_id], never=True)
        if job.after:
            return Waits(job.after[0])
        return NotYet(job.not_before_s) if job.not_before_s > now_s else None

    def _candidates(self, books: Books, blocked: Mapping[int, Obstacle]) -> Iterator[Candidate]:
        """The jobs whose user, group or array has a limit."""
        view, cluster = books.view, books.cluster
        rooms = self._rooms_of_users(cluster)
        throttles: dict[str, Room] = {}
        limited = np.array([bool(r) for r in rooms], np.bool_)
        ids = set(view.job_ids[limited[view.user]].tolist()) if len(view) else set()
        ids |= {i for i, b in self.barred.items() if limited[b[1][_USER]]}
        there = (i for i in self.conditional if i in view or i in self.barred)
        ids |= {i for i in there if books.jobs[i].throttle}
        for job_id in sorted(ids - blocked.keys()):
            if self._ceilings.get(job_id) == 0:
                continue
            job, user, gpus, gpu_type = self._state(books, job_id)
            own = rooms[user]
            if job.throttle is not None:
                key = job.throttle.key
                limits = Limits(max_running_jobs=job.throttle.max_running_jobs)
                room = throttles.setdefault(key, Room.of("array", key, limits, cluster.gpu_types, None))
                own = (*own, room)
            need, most = self._sizes_of(books, job_id, job, own)
            if any(most):
                tickets = cluster.users[user].tickets
                yield Candidate(job_id, user, tickets, job.priority, need, most, gpus, gpu_type, own)

    def _rooms_of_users(self, cluster: Cluster) -> list[tuple[Room, ...]]:
        """The rooms that the jobs of each user share."""
        self._rooms = []
        groups: dict[str, Room] = {}
        for group in cluster.groups:
            if group.limits:
                members = {i for i, u in enumerate(cluster.users) if u.group == group.name}
                used = self.use.of(members)
                room = Room.of("group", group.name, group.limits, cluster.gpu_types, used)
                groups[group.name] = room
                self._rooms.append((room, members))
        found: list[tuple[Room, ...]] = []
        for i, user in enumerate(cluster.users):
            mine: tuple[Room, ...] = ()
            if user.limits:
                room = Room.of("user", user.name, user.limits, cluster.gpu_types, self.use.of([i]))
                self._rooms.append((room, {i}))
                mine = (room,)
            found.append((*mine, groups[user.group]) if user.group in groups else mine)
        return found

    def _state(self, books: Books, job_id: int) -> tuple[Job, int, int, int]:
        """(job, user, GPUs, GPU type) of a job in the view or outside."""
        if job_id in self.barred:
            return books.jobs[job_id], int(self.barred[job_id][1][_USER]), 0, -1
        cells, row = books.view.cells, books.view.row(job_id)
        return books.jobs[job_id], cells.user[row], cells.gpus[row], cells.gpu_type[row]

    def _sizes_of(
        self, books: Books, job_id: int, job: Job, rooms: tuple[Room, ...]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """By GPU type: the smallest size with which it can run, and the largest that it can use."""
        usable = books.most_by_type(job_id).tolist()
        if not books.policy.elastic:
            need = [0] * len(usable)
            for t, most in enumerate(usable):
                if most:
                    limits = [r.gpus for r in rooms] + [r.of_type.get(t, job.requested_gpus) for r in rooms]
                    need[t] = max(job.gpus.floor(min(job.requested_gpus, *limits)), job.gpus.min)
            return tuple(need), tuple(need)
        ceiling = self._ceilings.get(job_id, max(usable))
        needs, mosts = [], []
        for t, most in enumerate(usable):
            need_gpus = books.least_size(job_id, t) if most >= job.gpus.min else job.gpus.min
            fits = need_gpus <= most
            needs.append(need_gpus if fits else 0)
            mosts.append(max(min(most, ceiling), need_gpus) if fits else 0)
        return tuple(needs), tuple(mosts)

    def take_out(self, books: Books, job_id: int) -> None:
        """Take a job out of the view."""
        if books.view.gpus[books.view.row(job_id)]:
            books.release(job_id)
        self.barred[job_id] = books.view.park(job_id)

    def _put_back(self, books: Books, job_id: int) -> None:
        books.view.unpark(job_id, self.barred.pop(job_id))
        self.sizes.pop(job_id, None)
        books.update_limits(job_id)

    def _limit_sizes(self, books: Books, sizes: dict[int, list[int]]) -> None:
        """Limit the rows of jobs that may run to these sizes."""
        tight = {i: s for i, s in sizes.items() if i in books.view and self._is_tight(books, i, s)}
        before, self.sizes = self.sizes, tight
        for job_id in before.keys() | tight.keys():
            if job_id in books.view and before.get(job_id) != tight.get(job_id):
                books.update_limits(job_id)

    def _is_tight(self, books: Books, job_id: int, sizes: list[int]) -> bool:
        job = books.jobs[job_id]
        most = books.most_by_type(job_id).tolist()
        if not books.policy.elastic:
            return any(m and s != job.requested_gpus for s, m in zip(sizes, most))
        return any(s < m for s, m in zip(sizes, most))

    # -- after the policy has decided --------------------------------------------------------------

    def offer_again(self, books: Books, free_gpus: int) -> bool:
        """Whether to decide again, because GPUs are idle that a limit reserves for jobs which did not get them."""
        if free_gpus <= 0 or not books.policy.backfills:
            return False
        if not any(isinstance(o, Bar) and o.limit in _SHARED for o in self.obstacles.values()):
            return False
        more = False
        view = books.view
        for row, job_id in enumerate(view.job_ids.tolist()):
            gpus = int(view.gpus[row])
            most = int(view.max_gpus[row] if books.policy.elastic else view.requested_gpus[row])
            limited = (
                job_id in self.sizes or job_id in self.conditional or self._has_limit(int(view.user[row]))
            )
            may_stay = gpus == 0 or books.policy.elastic
            if limited and may_stay and gpus < most and self._ceilings.get(job_id) != gpus:
                self._ceilings[job_id] = gpus
                more = True
        return more

    def _has_limit(self, user: int) -> bool:
        return any(user in members for _, members in self._rooms)

    def wake_s(self, books: Books, now_s: float) -> float:
        """When a job may run that may not now, or a quota is used up."""
        times = [o.until_s for o in self.obstacles.values() if isinstance(o, NotYet)]
        view = books.view
        had = np.bincount(view.user, weights=view.gpus, minlength=len(books.cluster.users))
        for room, members in self._rooms:
            quota_h = room.limits.gpu_hours_per_week
            if quota_h is None:
                continue
            next_week_s = self.use.week_start_s(now_s) + WEEK_S
            rate = float(sum(had[u] for u in members))
            if room.is_used_up:
                times.append(next_week_s)
            elif rate > 0:
                left_s = (3600.0 * quota_h - self.use.of(members)) / rate
                times.append(now_s + max(left_s, 1e-6))
        return min((t for t in times if t > now_s), default=float("inf"))


def _without(job: Job, after: After) -> Job:
    return replace(job, after=tuple(a for a in job.after if a != after))
