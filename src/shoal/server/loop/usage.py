"""The GPU usage of jobs, sampled every few seconds while they have a GPU to themselves (Liquid, TPDS 2021).

The usage of a job that succeeded and never shared its GPU is saved with it. Predictions for later jobs use it
(`needs`).
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shoal.executors.base import Executor, GpuUsage, NodeInfo
from shoal.knowledge.phases import BUSY_ABOVE, phases_of
from shoal.knowledge.unknown import Unknown
from shoal.server.api.models import JobState
from shoal.server.loop.live_job import ACTIVE, LiveJob
from shoal.server.loop.outbox import Outbox

log = logging.getLogger("shoal.server")

SAMPLE_S = 5.0
MIN_SAMPLES = 2


@dataclass(slots=True)
class Samples:
    """Of one job so far: sums, so that a job of many days takes no more room than a short one."""

    first_s: float
    count: int = 0
    total: float = 0.0
    squares: float = 0.0
    memory_mb: float = 0.0
    first_busy_s: float = math.nan
    last_busy_s: float = math.nan

    def add(self, usage: GpuUsage, now_s: float) -> None:
        self.count += 1
        self.total += usage.utilisation
        self.squares += usage.utilisation**2
        self.memory_mb = max(self.memory_mb, usage.memory_mb)
        if usage.utilisation > BUSY_ABOVE:
            self.last_busy_s = now_s
            self.first_busy_s = now_s if math.isnan(self.first_busy_s) else self.first_busy_s

    def labels(self, start_s: float, end_s: float) -> dict[str, float]:
        """As `needs` and the resource estimate name them; without phases where it was never busy."""
        mean = self.total / self.count
        found = {
            "gpu_util": mean,
            "gpu_util_std": math.sqrt(max(self.squares / self.count - mean**2, 0.0)),
            "gpu_mem_mb": self.memory_mb,
            "total_s": end_s - start_s,
        }
        if math.isnan(self.first_busy_s):
            return found
        busy_s = np.array([self.first_busy_s, self.last_busy_s])
        phases = phases_of(busy_s, np.array([100.0, 100.0]), start_s, end_s)
        return (
            found if isinstance(phases, Unknown) else found | {"pre_s": phases.pre_s, "post_s": phases.post_s}
        )


class Usage:
    def __init__(
        self,
        jobs: Mapping[int, LiveJob],
        nodes: Sequence[NodeInfo],
        executor: Executor,
        outbox: Outbox,
        shares: Callable[[LiveJob], bool],
        now_s: Callable[[], float],
    ) -> None:
        """`shares`: whether another job is on the GPU of a job."""
        self._jobs, self._nodes, self._executor, self._outbox = jobs, nodes, executor, outbox
        self._shares, self._now_s = shares, now_s
        self._samples: dict[int, Samples] = {}
        self._task: asyncio.Task[None] | None = None

    def watch(self) -> None:
        self._task = asyncio.create_task(self._look_regularly())

    async def _look_regularly(self) -> None:
        while True:
            await asyncio.sleep(SAMPLE_S)
            if all(node.virtual for node in self._nodes):
                continue  # virtual GPUs do nothing that could be looked at
            try:
                self.take(await asyncio.to_thread(self._executor.usage), self._now_s())
            except OSError:
                pass  # a driver that does not answer now may do so the next time
            except Exception:
                log.exception("cannot tell what the GPUs are used for; looking again in %g s", SAMPLE_S)

    def take(self, usage: Mapping[tuple[str, int], GpuUsage], now_s: float) -> None:
        """What the GPUs did at this moment."""
        if not usage:
            return
        for job in self._jobs.values():
            workers = list(job.workers.values())
            if len(workers) != 1 or workers[0].state != ACTIVE or self._shares(job):
                continue
            found = usage.get((workers[0].node, workers[0].device[1]))
            if found is not None and math.isfinite(found.utilisation) and math.isfinite(found.memory_mb):
                self._samples.setdefault(job.id, Samples(now_s)).add(found, now_s)

    def keep(self, job: LiveJob) -> None:
        """It is over: what it used is kept with it, if it was seen from start to end on one GPU of its own."""
        samples, life = self._samples.pop(job.id, None), job.life
        if samples is None or life.started_s is None or life.finished_s is None:
            return
        alone = life.state is JobState.SUCCEEDED and not (job.shared or life.restarts or job.resizes)
        whole_s = life.finished_s - life.started_s
        through = abs(life.running_s - whole_s) < SAMPLE_S and abs(life.gpu_s - whole_s) < SAMPLE_S
        seen = samples.count >= MIN_SAMPLES and samples.first_s - life.started_s < 2 * SAMPLE_S
        if alone and through and seen:
            job.used = samples.labels(life.started_s, life.finished_s)
            self._outbox.job(job)

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
