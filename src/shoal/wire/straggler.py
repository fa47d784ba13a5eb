"""Finding a slow worker by its compute time alone.

Or, Zhang and Freedman (MLSys'20): the compute throughput of each worker relative to the median of all, smoothed
with a weight of 0.1 per step; below 0.8 it is a straggler. Synchronisation time is left out: in it the fast wait
for the slow, so it says nothing about who is slow. Where the batch does not divide evenly, a worker must be slow
both in samples and in steps: a share that is one sample larger or smaller is not its fault.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

from shoal.wire.messages import Report


@dataclass(slots=True)
class StragglerRule:
    threshold: float = 0.8
    weight_per_step: float = 0.1
    min_steps: int = 10
    speed: dict[str, tuple[float, float]] = field(
        default_factory=dict
    )  # samples and steps per compute second
    smoothed: dict[str, float] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)
    named: set[str] = field(default_factory=set)

    def observe(self, worker: str, report: Report, members: tuple[str, ...]) -> tuple[str, float] | None:
        """(worker, relative speed) when this report shows it to be a straggler for the first time."""
        if worker not in members or report.steps < 1 or report.compute_s <= 0 or report.samples <= 0:
            return None
        self.speed[worker] = report.samples / report.compute_s, report.steps / report.compute_s
        self.steps[worker] = self.steps.get(worker, 0) + report.steps
        peers = [self.speed[m] for m in members if m in self.speed]
        if len(peers) < max(2, len(members)):
            return None
        medians = [statistics.median(column) for column in zip(*peers)]
        relative = max(mine / median for mine, median in zip(self.speed[worker], medians))
        keep = (1 - self.weight_per_step) ** report.steps
        self.smoothed[worker] = keep * self.smoothed.get(worker, relative) + (1 - keep) * relative
        slow = self.smoothed[worker] < self.threshold and self.steps[worker] >= self.min_steps
        if not slow or worker in self.named:
            return None
        self.named.add(worker)
        return worker, self.smoothed[worker]

    def forget(self, worker: str) -> None:
        for table in (self.speed, self.smoothed, self.steps):
            table.pop(worker, None)

    def reset(self) -> None:
        """After a reconfiguration the local batches are others: what was measured does not compare."""
        self.speed.clear()
        self.steps.clear()
