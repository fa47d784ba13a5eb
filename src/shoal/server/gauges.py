"""Current values for Prometheus, computed at each scrape. `metrics` counts what has happened."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from prometheus_client import Metric
from prometheus_client.metrics_core import GaugeMetricFamily

from shoal.executors.base import NodeInfo
from shoal.server.loop.devices import Devices
from shoal.server.loop.live_job import LiveJob
from shoal.server.services.loop_view import LoopView
from shoal.server.services.reasons import Reasons
from shoal.server.services.shares import Shares
from shoal.server.store.store import Store

#: Values of a family by the values of its labels, in the order of the label names.
Values = Mapping[tuple[str, ...], float]
#: Jobs to explain before other tasks of the event loop get a turn.
SLICE = 25


class GaugeLoop(LoopView, Protocol):
    """What the gauges need of the control loop."""

    @property
    def nodes(self) -> Sequence[NodeInfo]: ...

    @property
    def devices(self) -> Devices: ...

    def heartbeat_age_s(self) -> dict[str, float]: ...


class Gauges:
    def __init__(
        self,
        loop: GaugeLoop,
        store: Store,
        shares: Shares,
        reasons: Reasons,
        last_event: Callable[[], int],
        idle_s: Callable[[LiveJob], float | None],
    ) -> None:
        """`idle_s`: how long a job has held GPUs without using them."""
        self._idle_s = idle_s
        self._loop, self._store, self._shares = loop, store, shares
        self._reasons, self._last_event = reasons, last_event

    async def collect(self) -> list[Metric]:
        jobs, fragmented = await self._jobs()
        lines = self._shares.show().items
        held: Values = {(line.user,): line.gpus for line in lines}
        unused: Values = {(line.user,): line.unused_gpus for line in lines}
        ratio: Values = {
            (line.user,): line.gpus / line.entitled_gpus for line in lines if line.entitled_gpus > 0
        }
        ages: Values = {(node,): age_s for node, age_s in self._loop.heartbeat_age_s().items()}
        return [
            _gauge(
                "jobs",
                "Unfinished jobs, by owner, state and why they do not have all they could use.",
                jobs,
                ("user", "state", "reason"),
            ),
            _gauge(
                "gpus", "GPUs by owner, type and state.", self._gpus(fragmented), ("user", "type", "state")
            ),
            _gauge("user_gpus", "GPUs held by a user.", held, ("user",)),
            _gauge("fair_share_ratio", "GPUs held by a user over GPUs due; 1 is fair.", ratio, ("user",)),
            _gauge("agent_heartbeat_age_seconds", "Age of a node's oldest heartbeat.", ages, ("node",)),
            _gauge("guest_jobs", "Jobs on a GPU of another job.", self._colocated(), ("user", "as")),
            _gauge("unused_gpus", "GPUs held by jobs that do not use them.", unused, ("user",)),
            _gauge(
                "job_idle_seconds", "How long a job has not used its GPUs.", self._idle(), ("user", "job")
            ),
            _gauge("unmet_jobs", "Jobs given GPUs that others still hold.", {(): len(self._loop.unmet)}),
            _gauge("store_bytes", "Size of the store.", {(): self._store.size_bytes()}),
            _gauge("last_event", "Id of the last event.", {(): self._last_event()}),
        ]

    async def _jobs(self) -> tuple[Counter[tuple[str, ...]], bool]:
        """(jobs by labels, whether a job waits although enough GPUs for it are free)."""
        found: Counter[tuple[str, ...]] = Counter()
        fragmented = False
        for i, job in enumerate(list(self._loop.jobs.values())):
            if i % SLICE == SLICE - 1:
                await asyncio.sleep(0)
            if job.is_over:
                continue
            reason = self._reasons.reason(job)
            code = reason.code if reason else ""
            fragmented = fragmented or (code == "Fragmented" and not job.gpus)
            found[job.user, job.life.state.value, code] += 1
        return found, fragmented

    def _idle(self) -> Values:
        jobs = self._loop.jobs.values()
        return {(j.user, str(j.id)): idle_s for j in jobs if (idle_s := self._idle_s(j)) is not None}

    def _colocated(self) -> Counter[tuple[str, ...]]:
        jobs = [job for job in self._loop.jobs.values() if job.colocated]
        return Counter((job.user, "preparing" if job.prescheduled else "guest") for job in jobs)

    def _gpus(self, fragmented: bool) -> Values:
        """Held GPUs by user. Free GPUs are fragmented if they would suffice for a job that waits, else idle."""
        found: dict[tuple[str, ...], float] = {}

        def add(state: str, gpu_type: str, user: str, gpus: float) -> None:
            key = (user, gpu_type, state)
            found[key] = found.get(key, 0.0) + gpus

        nodes = self._loop.nodes
        for i, node in enumerate(nodes):
            free = node.gpus - self._loop.devices.used_of(i)
            add("fragmented", node.gpu_type, "", free if fragmented else 0)
            add("idle", node.gpu_type, "", 0 if fragmented else free)
        for job in self._loop.jobs.values():
            for worker in job.workers.values():
                if worker.holds_gpu and worker.device[0] >= 0:
                    add("allocated", nodes[worker.device[0]].gpu_type, job.user, worker.gpus)
        for state in ("borrowed", "lent"):
            for user, gpu_type, gpus in self._shares.rates(state):
                add(state, gpu_type, user, gpus)
        return found


def _gauge(name: str, help_: str, values: Values, labels: Iterable[str] = ()) -> Metric:
    family = GaugeMetricFamily(f"shoal_{name}", help_, labels=tuple(labels))
    for key, value in sorted(values.items()):
        family.add_metric(key, float(value))
    return family
