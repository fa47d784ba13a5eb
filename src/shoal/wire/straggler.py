"""Straggler detection by compute time.

Or, Zhang and Freedman (MLSys'20): the compute speed of each worker relative to the median of all workers, smoothed
with a weight of 0.1 per step. Below 0.8 the worker is a straggler. A few slow workers do not move the median.
Synchronisation time does not count: fast workers spend it waiting for slow ones. If the batch does not divide evenly,
a worker must be slow both in samples and in steps, because its share may be one sample larger or smaller.

Two rules of our own reduce false alarms. The average starts as a plain mean, so that one slow first step does not
linger. The average must stay below the threshold in three successive reports, so that one step that hangs does not
count. `bench/knowledge_stragglers.py` measures how often each rule reports a healthy worker.

The rule is here and not in `knowledge`, because a job without a server detects stragglers too.
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
    below: int = 0  # successive reports with the average below the threshold


@dataclass(slots=True)
class StragglerRule:
    threshold: float = 0.8
    weight_per_step: float = 0.1
    min_steps: int = 10
    confirm_reports: int = 3
    #: Start as the authors do: the first value counts in full.
    from_first: bool = False
    named: set[str] = field(default_factory=set)
    _workers: dict[str, _Worker] = field(default_factory=dict)

    def observe(self, worker: str, report: Report, members: tuple[str, ...]) -> tuple[str, float] | None:
        """Return (worker, relative speed) if this report identifies a straggler for the first time."""
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
        """Forget speeds after a reconfiguration: local batches have changed, so they do not compare."""
        for worker in self._workers.values():
            worker.speed, worker.steps, worker.below = None, 0, 0
