"""Stride scheduling of jobs that time-slice a node: plain, and gang-aware.

Every job has a pass: the service that it received per ticket. In each quantum the jobs with the lowest pass run, and
their pass grows by size / tickets. Over time, GPU time is in proportion to tickets for any gang sizes (Waldspurger &
Weihl 1995; for gangs Chaudhary et al., EuroSys'20).

Passes are floats or fractions. With fractions the results are exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Generic, TypeVar

from shoal.core.errors import ShoalError

Number = TypeVar("Number", float, Fraction)


@dataclass(frozen=True, slots=True)
class Strider(Generic[Number]):
    """A job under stride scheduling."""

    name: str
    tickets: Number
    size_gpus: int = 1
    #: Service per ticket so far (`pass` is a keyword of Python).
    passed: Number = 0  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if not self.tickets > 0:
            raise ShoalError(f"job {self.name!r} has {self.tickets} tickets; give a positive number")
        if self.size_gpus < 1:
            raise ShoalError(f"job {self.name!r} has a gang of {self.size_gpus} GPUs; it needs at least 1")

    @property
    def stride(self) -> Number:
        """The increase of the pass in one quantum."""
        return self.size_gpus / self.tickets

    def ran(self) -> Strider[Number]:
        return replace(self, passed=self.passed + self.stride)


def pick_plain(jobs: Sequence[Strider[Number]]) -> int:
    """Plain stride: the job with the lowest pass, the first of equals; -1 without jobs."""
    return min(range(len(jobs)), key=lambda i: jobs[i].passed, default=-1)


def pick_gangs(jobs: Sequence[Strider[Number]], free_gpus: int) -> list[int]:
    """Gang-aware stride: the jobs that run in this quantum, in the order in which they were taken.

    Jobs are sorted by pass, equals in the order of the sequence. A gang that does not fit is skipped and keeps its
    pass, and later jobs may fill the gap. In the next quantum all GPUs are free and the skipped gang is first, so no
    gang starves.
    """
    chosen = []
    for i in sorted(range(len(jobs)), key=lambda i: jobs[i].passed):
        if jobs[i].size_gpus <= free_gpus:
            chosen.append(i)
            free_gpus -= jobs[i].size_gpus
    return chosen


@dataclass(slots=True)
class GangStride(Generic[Number]):
    """Jobs that time-slice the GPUs of one node. They may join, leave and change their tickets at any time.

    The node's own pass grows by used GPUs / sum of tickets: the pass of a job that receives exactly its due. A job's
    lag, (pass - node pass) * tickets, is the service that it received beyond its due. Jobs that join or leave do not
    change the lag of others, and a change of tickets does not change the lag of the job.
    """

    gpus: int
    #: In tie order: of equal passes the earlier one goes first.
    jobs: list[Strider[Number]] = field(default_factory=list)
    passed: Number = 0  # type: ignore[assignment]

    def quantum(self) -> list[str]:
        """Run one quantum. Returns the names of the jobs that ran."""
        chosen = pick_gangs(self.jobs, self.gpus)
        used = sum(self.jobs[i].size_gpus for i in chosen)
        if used:
            self.passed += used / self._tickets()
        for i in chosen:
            self.jobs[i] = self.jobs[i].ran()
        return [self.jobs[i].name for i in sorted(chosen)]

    def join(self, job: Strider[Number], lag: Number = 0) -> None:  # type: ignore[assignment]
        """Add a job with a lag: 0 for a new job, otherwise the result of `leave` on another node.

        The job starts at the node's pass. If it started at 0, it would have the node to itself until it caught up.
        """
        if job.size_gpus > self.gpus:
            raise ShoalError(
                f"job {job.name!r} is a gang of {job.size_gpus} GPUs and the node has {self.gpus}; "
                "give it to the central scheduler"
            )
        if any(other.name == job.name for other in self.jobs):
            raise ShoalError(f"job {job.name!r} is here already")
        self.jobs.append(replace(job, passed=self.passed + lag / job.tickets))

    def leave(self, name: str) -> Number:
        """Remove a job. Returns its lag in GPU-quanta, above 0 if it received more than its due."""
        i = self._index(name)
        lag = self.lag(name)
        del self.jobs[i]
        return lag

    def retickets(self, name: str, tickets: Number) -> None:
        """Change a job's tickets. Its lag and its place in the tie order stay."""
        i = self._index(name)
        lag = self.lag(name)
        self.jobs[i] = replace(self.jobs[i], tickets=tickets, passed=self.passed + lag / tickets)

    def lag(self, name: str) -> Number:
        job = self.jobs[self._index(name)]
        return (job.passed - self.passed) * job.tickets

    def _tickets(self) -> Number:
        return sum(job.tickets for job in self.jobs)  # type: ignore[return-value]

    def _index(self, name: str) -> int:
        for i, job in enumerate(self.jobs):
            if job.name == name:
                return i
        raise ShoalError(f"there is no job {name!r} here")
