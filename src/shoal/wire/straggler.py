"""Workers that hold the others up, found by their compute time alone.

Or, Zhang and Freedman (MLSys'20): the compute speed of each worker relative to the median of all, smoothed with a
weight of 0.1 per step; below 0.8 it is a straggler. The median does not move when a few are slow. Synchronisation
time is left out: in it the fast wait for the slow, so it says nothing about who is slow. Where the batch does not
divide evenly, a worker must be slow both in samples and in steps: a share that is one sample larger or smaller is not
its fault.

Two things are ours, to have fewer false alarms: the average begins as a plain mean, so that one bad first step does
not linger, and it must have been below the limit in three reports in a row, so that a step that hangs is no alarm.
`bench/knowledge_stragglers.py` tells how often either rule accuses the healthy.

It is here and not with what else is learned of jobs, because a job finds its stragglers without a server too.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

from shoal.wire.messages import Report


@dataclass(slots=True)
class _Worker:
    #: Samples and steps per compute second, as last reported in this generation.
    speed: tuple[float, float] | None = None
    steps: int = 0  # in this generation
    seen: int = 0  # in all
    average: float = 1.0  # of its speed relative to the median
    below: int = 0  # reports in a row with the average below the limit


@dataclass(slots=True)
class StragglerRule:
    threshold: float = 0.8
    weight_per_step: float = 0.1
    min_steps: int = 10
    confirm_reports: int = 3
    #: The authors' start: the first value counts in full, and lingers.
    from_first: bool = False
    named: set[str] = field(default_factory=set)
    _workers: dict[str, _Worker] = field(default_factory=dict)

    def observe(self, worker: str, report: Report, members: tuple[str, ...]) -> tuple[str, float] | None:
        """(worker, relative speed) when this report shows it to be a straggler for the first time."""
        if worker not in members or report.steps < 1 or report.compute_s <= 0 or report.samples <= 0:
            return None
        mine = self._workers.setdefault(worker, _Worker())
        mine.speed = report.samples / report.compute_s, report.steps / report.compute_s
        mine.steps += report.steps
        speeds = [w.speed for m in members if (w := self._workers.get(m)) is not None and w.speed is not None]
        if len(speeds) < max(2, len(members)):
            return None
        medians = [statistics.median(column) for column in zip(*speeds)]
        relative = max(one / median for one, median in zip(mine.speed, medians))
        self._smooth(mine, relative, report.steps)
        if mine.below < self.confirm_reports or mine.steps < self.min_steps or worker in self.named:
            return None
        self.named.add(worker)
        return worker, mine.average

    def _smooth(self, worker: _Worker, relative: float, steps: int) -> None:
        is_first = worker.seen == 0
        worker.seen += steps
        share = 1.0 - (1.0 - self.weight_per_step) ** steps
        if not self.from_first:
            share = max(share, steps / worker.seen)
        worker.average += (1.0 if is_first else share) * (relative - worker.average)
        worker.below = worker.below + 1 if worker.average < self.threshold else 0

    def forget(self, worker: str) -> None:
        self._workers.pop(worker, None)

    def reset(self) -> None:
        """After a reconfiguration the local batches are others: what was measured does not compare."""
        for worker in self._workers.values():
            worker.speed, worker.steps, worker.below = None, 0, 0
