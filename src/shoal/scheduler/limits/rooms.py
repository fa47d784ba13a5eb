"""Divide what limits allow among jobs: which jobs may run, and how large each may be at most.

The sizes that `divide` returns sum up to no more than each limit, so a policy that keeps to them cannot exceed one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from shoal.core.limits import Limits

#: More than any number of GPUs or jobs.
UNLIMITED = 1 << 60


@dataclass(slots=True, eq=False)
class Room:
    """What a limit holder (a user, a group or an array of jobs) may still get."""

    #: `user`, `group` or `array`.
    kind: str
    name: str
    limits: Limits
    gpus: int
    jobs: int
    #: By index of the GPU type, for types with a limit: what is left, and the limit.
    of_type: dict[int, int]
    type_limits: dict[int, int]
    #: GPU-seconds used this week; None if they do not matter.
    used_gpu_s: float | None = None

    @classmethod
    def of(
        cls, kind: str, name: str, limits: Limits, gpu_types: Sequence[str], used_gpu_s: float | None
    ) -> Room:
        by_type = {t: limits.of_type[word] for t, word in enumerate(gpu_types) if word in limits.of_type}
        return cls(
            kind,
            name,
            limits,
            UNLIMITED if limits.max_gpus is None else limits.max_gpus,
            UNLIMITED if limits.max_running_jobs is None else limits.max_running_jobs,
            dict(by_type),
            by_type,
            used_gpu_s,
        )

    @property
    def is_used_up(self) -> bool:
        """Whether the GPU hours of this week are used up."""
        quota_h = self.limits.gpu_hours_per_week
        if quota_h is None or self.used_gpu_s is None:
            return False
        return self.used_gpu_s >= 3600.0 * quota_h - 1e-6


@dataclass(slots=True, eq=False)
class Candidate:
    """A job that would run if no limit were in its way."""

    job_id: int
    user: int
    tickets: float
    priority: int
    #: By GPU type: the smallest size at which it can run there, and the largest that it can use; 0, 0 where it cannot.
    need: tuple[int, ...]
    most: tuple[int, ...]
    gpus: int
    gpu_type: int
    rooms: tuple[Room, ...]


@dataclass(frozen=True, slots=True)
class Bar:
    """The limit that keeps a job from running, or from growing."""

    room: Room
    #: The name of the limit in `Limits`.
    limit: str
    #: For `max_gpus_of_type`: the type.
    gpu_type: int = -1
    #: The job alone exceeds the limit.
    alone: bool = False


@dataclass(slots=True)
class Division:
    """The result of `divide`."""

    #: By job, by GPU type: the most GPUs that it may have.
    sizes: dict[int, list[int]] = field(default_factory=dict)
    #: By job: why it may not run, or not grow to all that it could use.
    bars: dict[int, Bar] = field(default_factory=dict)


def divide(candidates: Iterable[Candidate], *, fair: bool, elastic: bool) -> Division:
    """Let jobs run in order, then let them grow in order.

    A user's jobs that have GPUs come first, then those of a higher priority, then older ones. Between users of a group
    the one with the fewest GPUs per ticket is next; unless `fair`, all jobs that have GPUs come before that.
    """
    jobs = list(candidates)
    found = Division()
    passes = [jobs] if fair else [[c for c in jobs if c.gpus], [c for c in jobs if not c.gpus]]
    admitted: list[Candidate] = []
    given: dict[int, float] = {}
    for part in passes:
        for candidate in _in_turn(part, given):
            bar = _bar(candidate)
            if bar is not None:
                found.bars[candidate.job_id] = bar
                continue
            found.sizes[candidate.job_id] = _admit(candidate)
            given[candidate.user] = given.get(candidate.user, 0.0) + _cost(candidate)
            admitted.append(candidate)
    if elastic:
        _grow(admitted, given, found)
    return found


def _in_turn(jobs: list[Candidate], given: dict[int, float]) -> Iterable[Candidate]:
    """The jobs of each user in their order; the user with the fewest GPUs per ticket is next."""
    queues: dict[int, list[Candidate]] = {}
    for c in sorted(jobs, key=lambda c: (c.gpus == 0, -c.priority, c.job_id), reverse=True):
        queues.setdefault(c.user, []).append(c)
    turns = [_turn(queue[-1], given) for queue in queues.values()]
    heapify(turns)
    while turns:
        *_, user = heappop(turns)
        queue = queues[user]
        yield queue.pop()
        if queue:
            heappush(turns, _turn(queue[-1], given))


def _turn(c: Candidate, given: dict[int, float]) -> tuple[float, bool, int, int]:
    return (given.get(c.user, 0.0) / c.tickets, c.gpus == 0, c.job_id, c.user)


def _cost(c: Candidate) -> int:
    return min(need for need, most in zip(c.need, c.most) if most)


def _types(c: Candidate) -> list[int]:
    """The types that it can use, with room for it. One that runs on a type does not move to another limited one."""
    usable = [t for t, most in enumerate(c.most) if most and all(_has_room(r, t, c.need[t]) for r in c.rooms)]
    if c.gpu_type in usable:
        return [t for t in usable if t == c.gpu_type or all(t not in r.of_type for r in c.rooms)]
    return usable


def _has_room(room: Room, t: int, gpus: int) -> bool:
    return room.gpus >= gpus and room.of_type.get(t, UNLIMITED) >= gpus


def _bar(c: Candidate) -> Bar | None:
    """The first limit that does not let it run."""
    least = _cost(c)
    for room in c.rooms:
        limits = room.limits
        if room.is_used_up:
            return Bar(room, "gpu_hours_per_week")
        if limits.max_gpus is not None and least > room.gpus:
            return Bar(room, "max_gpus", alone=least > limits.max_gpus)
        if room.jobs < 1:
            return Bar(room, "max_running_jobs", alone=limits.max_running_jobs == 0)
    if _types(c):
        return None
    blocked = [
        (room, t) for room in c.rooms for t in room.of_type if c.most[t] and room.of_type[t] < c.need[t]
    ]
    if not blocked:  # it needs more on the types that have room than the first check assumed
        return Bar(next(r for r in c.rooms if r.limits.max_gpus is not None), "max_gpus")
    alone = all(c.need[t] > room.type_limits[t] for room, t in blocked)
    first_room, first_type = blocked[0]
    return Bar(first_room, "max_gpus_of_type", first_type, alone=alone)


def _admit(c: Candidate) -> list[int]:
    sizes = [0] * len(c.most)
    for t in _types(c):
        sizes[t] = c.need[t]
    for room in c.rooms:
        room.jobs -= 1
        room.gpus -= max(sizes)
        for t in room.of_type:
            room.of_type[t] -= sizes[t]
    return sizes


def _grow(admitted: list[Candidate], given: dict[int, float], found: Division) -> None:
    """Let jobs grow by one GPU at a time: users by GPUs per ticket, their jobs by priority, then the smallest."""
    by_id = {}
    for c in admitted:
        if all(r.gpus >= UNLIMITED // 2 and not r.of_type for r in c.rooms):
            found.sizes[c.job_id] = list(c.most)  # no limit of GPUs
        else:
            by_id[c.job_id] = c
    turns = [_growth(c, given, found) for c in by_id.values()]
    heapify(turns)
    while turns:
        share, *_, job_id = heappop(turns)
        c = by_id[job_id]
        now = _growth(c, given, found)
        if now[0] > share:  # its user has got more meanwhile
            heappush(turns, now)
            continue
        grew, bar = _grow_by_one(c, found.sizes[job_id])
        if bar is not None:
            found.bars[job_id] = bar
        if grew:
            given[c.user] = given.get(c.user, 0.0) + 1
            heappush(turns, _growth(c, given, found))


def _growth(c: Candidate, given: dict[int, float], found: Division) -> tuple[float, int, int, int]:
    return (given.get(c.user, 0.0) / c.tickets, -c.priority, max(found.sizes[c.job_id]), c.job_id)


def _grow_by_one(c: Candidate, sizes: list[int]) -> tuple[bool, Bar | None]:
    """Raise its size by one on every type with room. Returns whether it grew, and the limit that is in the way."""
    top, bar = max(sizes), None
    rises = [t for t, size in enumerate(sizes) if 0 < size < c.most[t]]
    grows = []
    for t in rises:
        full = next((r for r in c.rooms if r.of_type.get(t, 1) < 1), None)
        if full is None:
            grows.append(t)
        else:
            bar = Bar(full, "max_gpus_of_type", t, alone=sizes[t] == full.type_limits[t])
    if any(sizes[t] == top for t in grows):
        for room in c.rooms:
            if room.gpus < 1:
                return False, Bar(room, "max_gpus", alone=top == room.limits.max_gpus)
    for t in grows:
        sizes[t] += 1
        for room in c.rooms:
            if t in room.of_type:
                room.of_type[t] -= 1
    for room in c.rooms:
        room.gpus -= max(sizes) - top
    return bool(grows), None if grows else bar
