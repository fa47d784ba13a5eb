"""Split stride: a central scheduler for gangs that span nodes, and gang-aware stride on every node.

One stride scheduler over the whole cluster would migrate jobs without bound. Therefore jobs are bound to nodes. Each
node time-slices its small jobs. A central scheduler orders the gangs that span nodes against one aggregate job per
node, which has the sum of the tickets of the node's small jobs (Chaudhary et al., EuroSys'20).

This is the reference implementation, exact with fractions. The kernel `quantum.split_stride` must equal it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Generic, TypeVar

from shoal.core.errors import ShoalError
from shoal.policies.gandiva_fair.stride import Strider, pick_gangs

Number = TypeVar("Number", float, Fraction)

#: GPUs a job holds when it runs, by node.
Home = Mapping[int, int]


def aggregate_pass(jobs: Sequence[Strider[Number]]) -> Number:
    """The pass of a node's small jobs as one job: the mean of their passes, weighted by tickets.

    When small jobs run, it grows by used GPUs / sum of tickets, as the pass of one job with the sum of the tickets
    does. As a mean it needs no state of its own when jobs arrive and leave.
    """
    tickets = sum(job.tickets for job in jobs)
    return sum((job.passed * job.tickets for job in jobs), start=0 * tickets) / tickets  # type: ignore


@dataclass(slots=True)
class SplitStride(Generic[Number]):
    """A cluster under split stride. Jobs are in tie order; `homes` are the nodes that each is bound to."""

    gpus_of_node: Sequence[int]
    jobs: list[Strider[Number]] = field(default_factory=list)
    homes: list[dict[int, int]] = field(default_factory=list)

    def add(self, job: Strider[Number], home: Home) -> None:
        if sum(home.values()) != job.size_gpus:
            raise ShoalError(f"job {job.name!r} is a gang of {job.size_gpus} but its home has {dict(home)}")
        for node, gpus in home.items():
            if gpus > self.gpus_of_node[node]:
                raise ShoalError(
                    f"job {job.name!r} wants {gpus} GPUs of node {node}, which has {self.gpus_of_node[node]}"
                )
        self.jobs.append(job)
        self.homes.append(dict(home))

    def quantum(self) -> list[str]:
        """Run one quantum. Returns the names of the jobs that ran."""
        chosen = self.pick()
        for i in chosen:
            self.jobs[i] = self.jobs[i].ran()
        return [self.jobs[i].name for i in chosen]

    def pick(self, running: Sequence[int] = ()) -> list[int]:
        """Positions of the jobs that run. Those in `running` continue: their quantum has not ended."""
        free = list(self.gpus_of_node)
        chosen = set(running)
        for i in running:
            self._take(free, i)
        small: dict[int, list[int]] = {}
        for i, home in enumerate(self.homes):
            if len(home) == 1 and i not in chosen:
                small.setdefault(next(iter(home)), []).append(i)
        entries: list[tuple[Number, int, int]] = [
            (self.jobs[i].passed, -1, i)
            for i, home in enumerate(self.homes)
            if len(home) > 1 and i not in chosen
        ]
        entries += [(aggregate_pass([self.jobs[i] for i in at]), node, -1) for node, at in small.items()]
        for _, node, big in sorted(entries):
            if big >= 0:
                if all(free[s] >= gpus for s, gpus in self.homes[big].items()):
                    self._take(free, big)
                    chosen.add(big)
                continue
            local = small[node]
            for k in pick_gangs([self.jobs[i] for i in local], free[node]):
                self._take(free, local[k])
                chosen.add(local[k])
        return sorted(chosen)

    def _take(self, free: list[int], i: int) -> None:
        for node, gpus in self.homes[i].items():
            free[node] -= gpus

    def move(self, i: int, home: Home) -> None:
        """Bind a job to other nodes. It keeps its pass."""
        self.homes[i] = dict(home)

    def retickets(self, i: int, tickets: Number, at_pass: Number) -> None:
        """Change the tickets of a job, and keep its lag relative to `at_pass`."""
        job = self.jobs[i]
        lag = (job.passed - at_pass) * job.tickets
        self.jobs[i] = replace(job, tickets=tickets, passed=at_pass + lag / tickets)
