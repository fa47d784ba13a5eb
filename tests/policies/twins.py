"""Simulators of Tiresias, Themis and AFS-P in plain Python: jobs as objects, queues as lists, no arrays."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from . import naive

EPS = 1e-9
#: The queue before all others.
STARVING = -1


@dataclass(eq=False)
class Twin:
    """A job and its progress."""

    at: int
    submit_s: float
    work: float
    want: int
    speed: list[float]
    gpus: int = 0
    done: float = 0.0
    attained: float = 0.0  # GPU-seconds since it was last promoted
    queue: int = 0
    first_s: float = math.inf
    since_s: float = math.inf  # when it last got its GPUs
    changed_s: float = 0.0
    ran_s: float = 0.0  # its last run
    turns: int = 0  # quanta used
    ends_s: float = 0.0  # its quantum
    finish_s: float = math.nan

    @property
    def fastest(self) -> int:
        """The fastest share up to `want`."""
        return max(range(self.want + 1), key=self.speed.__getitem__)

    def run(self, seconds: float) -> None:
        self.done += self.speed[self.gpus] * seconds
        self.attained += self.gpus * seconds

    def give(self, gpus: int, now: float) -> None:
        if gpus == self.gpus:
            return
        if self.gpus == 0:
            self.since_s, self.first_s = now, min(self.first_s, now)
        self.gpus, self.changed_s = gpus, now

    def ends_at(self, now: float) -> float:
        return now + (self.work - self.done) / self.speed[self.gpus] if self.gpus else math.inf


#: Gives the active jobs their GPUs, and returns when to be called again.
Rule = Callable[[list[Twin], float], float]


def simulate(jobs: list[Twin], rule: Rule) -> list[float]:
    """The end of each job. The state of every job is updated at every event."""
    coming, here, now, wake = sorted(jobs, key=lambda j: j.submit_s), [], 0.0, math.inf
    while coming or here:
        then = min([wake, *(j.submit_s for j in coming[:1]), *(j.ends_at(now) for j in here)])
        for job in here:
            job.run(then - now)
        now = then
        for job in [j for j in here if j.gpus and j.work - j.done <= EPS * j.work]:
            job.finish_s = now
            here.remove(job)
        while coming and coming[0].submit_s <= now:
            coming[0].changed_s = now
            here.append(coming.pop(0))
        wake = rule(here, now)
    return [job.finish_s for job in jobs]


def _fill(line: list[Twin], gpus: int, now: float) -> None:
    """All or nothing in this order; a job that does not fit is skipped."""
    given = {}
    for job in line:
        given[job] = job.want if job.want <= gpus else 0
        gpus -= given[job]
    for job, got in given.items():
        job.give(got, now)


@dataclass
class Tiresias:
    """Queues as lists of jobs, as in Tiresias' own simulator."""

    gpus: int
    thresholds: tuple[float, ...]
    promote: float = 0.0
    queues: list[list[Twin]] = field(default_factory=list)

    def __call__(self, here: list[Twin], now: float) -> float:
        if not self.queues:
            self.queues = [[] for _ in range(len(self.thresholds) + 1)]
        known = [j for queue in self.queues for j in queue]
        self.queues = [[j for j in queue if j in here] for queue in self.queues]
        entering: list[list[Twin]] = [[j for j in here if j not in known]] + [[] for _ in self.thresholds]
        for job in list(known):
            if job in here:
                self._look_at(job, now, entering)
        for queue, new in zip(self.queues, entering):
            queue += sorted(new, key=lambda j: j.submit_s)
        _fill([j for queue in self.queues for j in queue], self.gpus, now)
        for queue in self.queues:
            queue.sort(key=lambda j: j.gpus == 0)  # running jobs first, otherwise in the same order
        return self._next(here, now)

    def _look_at(self, job: Twin, now: float, entering: list[list[Twin]]) -> None:
        level = sum(job.attained >= t - EPS for t in self.thresholds)
        if level > job.queue:
            self.queues[job.queue].remove(job)
            entering[level].append(job)
            job.queue = level
        if job.gpus:
            job.ran_s = now - job.since_s
        elif self.promote and job.queue and now - job.changed_s >= self.promote * job.ran_s - EPS:
            for line in (*self.queues, *entering):
                if job in line:
                    line.remove(job)
            entering[0].append(job)
            job.queue, job.attained = 0, 0.0

    def _next(self, here: list[Twin], now: float) -> float:
        times = [math.inf]
        if all(j.gpus for j in here):
            return math.inf
        for j in here:
            if j.gpus and j.queue < len(self.thresholds):
                times.append(now + (self.thresholds[j.queue] - j.attained) / j.gpus)
            if not j.gpus and j.queue and self.promote:
                times.append(j.changed_s + self.promote * j.ran_s)
        return min(times)


@dataclass
class TiresiasOfAfs:
    """The variant of the AFS authors: service since the last start, order by first start, promoted jobs first."""

    gpus: int
    thresholds: tuple[float, ...]
    promote: float = 0.0

    def __call__(self, here: list[Twin], now: float) -> float:
        for j in here:
            if j.gpus:
                served = j.gpus * (now - j.since_s)
                j.queue = max(j.queue, sum(served >= t - EPS for t in self.thresholds))
                j.ran_s = now - j.since_s
            elif self.promote and j.queue > 0 and now - j.changed_s >= self.promote * j.ran_s - EPS:
                j.queue = STARVING
        was = {j: j.gpus for j in here}
        _fill(sorted(here, key=lambda j: (j.queue, j.first_s, j.submit_s)), self.gpus, now)
        for j in here:
            if j.gpus and not was[j]:
                j.queue = 0
        if all(j.gpus for j in here):
            return math.inf
        times = [math.inf]
        for j in here:
            if j.gpus and j.queue < len(self.thresholds):
                times.append(j.since_s + self.thresholds[j.queue] / j.gpus)
            if not j.gpus and j.queue > 0 and self.promote:
                times.append(j.changed_s + self.promote * j.ran_s)
        return min(times)


@dataclass
class Themis:
    """Largest rho first when leases end; free GPUs by rho in between."""

    gpus: int
    lease_s: float
    ends_s: float = -math.inf
    seen: list[int] = field(default_factory=list)

    def rho(self, job: Twin, now: float) -> float:
        fair = min(self.gpus / max(sum(self.seen) / len(self.seen), 1.0), job.want)
        ideal = job.work / job.speed[job.want] * job.want / fair
        return round((now - job.submit_s + (job.work - job.done) / job.speed[job.want]) / ideal, 9)

    def __call__(self, here: list[Twin], now: float) -> float:
        self.seen.append(len(here))
        if sum(j.want for j in here) <= self.gpus:
            for j in here:
                j.give(j.want, now)
            return math.inf
        worst_first = sorted(here, key=lambda j: -self.rho(j, now))
        shares = dict.fromkeys(here, 0)
        if now < self.ends_s:
            shares = {j: j.gpus for j in here}
        else:
            self.ends_s = (math.floor(now / self.lease_s) + 1) * self.lease_s
        free = self.gpus - sum(shares.values())
        for j in worst_first:
            more = min(j.want - shares[j], free)
            shares[j] += more
            free -= more
        for j, share in shares.items():
            j.give(share, now)
        return self.ends_s


@dataclass
class AfsP:
    """Quanta while there are at least as many jobs as GPUs; a fold for each further GPU, in the same order."""

    gpus: int
    quantum_s: float
    tie: str

    def __call__(self, here: list[Twin], now: float) -> float:
        kept = [j for j in here if j.gpus and j.ends_s > now and len(here) >= self.gpus]
        for job in here:
            job.turns += bool(job.gpus) and job not in kept and len(here) >= self.gpus
        others = [j for j in here if j not in kept]
        others.sort(key=lambda j: (j.turns, j.first_s, j.submit_s))
        left = self.gpus - sum(j.gpus for j in kept)
        shares = [j.gpus if j in kept else int(j in others[:left]) for j in here]
        for line in (others, kept):  # jobs that keep a share get the GPUs that the others cannot use
            shares = naive.hand_out_without_lengths(
                shares, [j.speed for j in here], [j.fastest for j in here], self.gpus - sum(shares), self.tie,
                [here.index(j) for j in line],
            )  # fmt: skip
        for job, share in zip(here, shares):
            job.give(share, now)
            if share and job not in kept:
                job.ends_s = now + self.quantum_s
        return min([math.inf, *(j.ends_s for j in here if j.gpus)])
