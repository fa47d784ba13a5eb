"""The control loop: it asks the scheduler for decisions and carries them out.

It owns the scheduler, the live jobs and the GPUs, and runs in the thread of one event loop. A decision follows
an event at once; events that arrive during a cycle, or within `inbox.COALESCE_S` of it, are decided together.
Decisions are written before they are carried out (`outbox`), so the server can be killed at any moment: the
next one reads from the store what was decided, learns from the executor what runs, and continues. See
docs/design/030-server.md.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from pathlib import Path
from typing import Any

from shoal.core.cluster import Cluster
from shoal.core.events import (
    Cancelled,
    Event,
    Finished,
    Held,
    NodeBack,
    NodeLost,
    Timer,
)
from shoal.executors.base import Executor, Exit
from shoal.placement.placer import Placer
from shoal.placement.registry import Setting, make_placer
from shoal.policies.base import Policy
from shoal.policies.registry import make_policy
from shoal.scheduler.scheduler import Scheduler
from shoal.server.api.models import Resize
from shoal.server.home import Home
from shoal.server.loop import shutdown, snapshot
from shoal.server.loop.causes import causes_of
from shoal.server.loop.clock import Clock
from shoal.server.loop.devices import Devices
from shoal.server.loop.elastic_runner import ElasticRunner
from shoal.server.loop.event_time import EventTime
from shoal.server.loop.fixed_runner import FixedRunner
from shoal.server.loop.inbox import Inbox
from shoal.server.loop.live_job import LiveJob
from shoal.server.loop.live_ledger import LiveLedger
from shoal.server.loop.outbox import Outbox
from shoal.server.loop.phases import Phases
from shoal.server.loop.policy_change import with_policy
from shoal.server.loop.profiles import Profiles
from shoal.server.loop.reconciler import Reconciler
from shoal.server.loop.restart import (
    make_cluster,
    missed_events,
    read_jobs,
    repeat_orders,
    restored_scheduler,
    tickets_of,
)
from shoal.server.loop.runner import Parts, Runner
from shoal.server.loop.saver import Saver
from shoal.server.loop.searches import Searches
from shoal.server.loop.sharing.sharing import Sharing
from shoal.server.loop.targets import Targets
from shoal.server.loop.usage import Usage
from shoal.server.metrics import Metrics
from shoal.server.store.store import Store

log = logging.getLogger("shoal.server")

COOL_DOWN_S = 10.0
#: The cost of a migration that placements assume, in seconds without progress: far more than the pause of a switch.
MOVE_S = 5.0


class ControlLoop:
    def __init__(
        self,
        store: Store,
        executor: Executor,
        home: Home,
        clock: Clock,
        *,
        policy: str,
        policy_options: dict[str, str] | None = None,
        placement: str = "auto",
        share: bool = False,
        pre_schedule: bool = False,
        cool_down_s: float = COOL_DOWN_S,
    ) -> None:
        self.store, self.executor, self.home, self.clock = store, executor, home, clock
        self.now_s = clock.now_s
        self.cool_down_s = cool_down_s
        self.nodes = executor.nodes()
        self.policy_name, self.policy_options = policy, policy_options or {}
        self.placement = placement
        self.jobs: dict[int, LiveJob] = {}
        self.devices = Devices(n.gpus for n in self.nodes)
        self.outbox = Outbox(store, clock.now_s, self._snapshot)
        self.metrics = Metrics()
        #: Nodes that are out of use, by index.
        out_of_use = set(store.get("drained", []))
        self.drained = {i for i, node in enumerate(self.nodes) if node.name in out_of_use}
        #: Jobs that wait for GPUs which others have not released yet.
        self.unmet: set[int] = set()
        self.warnings: list[str] = []
        self.decided_s: float | None = None
        #: Whether the jobs and workers of the last server are known. Nothing is decided or carried out before.
        self.ready = False
        self.stopping = False
        self._inbox = Inbox(self._cycle, lambda: self.is_running)
        self.reconciler = Reconciler(self, self.jobs, self.unmet, self.outbox)
        self.soon, self.reconcile_next = self.reconciler.soon, self.reconciler.reconcile_next
        self.settle, self.settle_soon = self.reconciler.settle, self.reconciler.settle_soon
        self.gpus_freed = self.reconciler.gpus_freed
        times = EventTime(self.now_s)
        self.as_of, self.then_s = times.as_of, times.then_s
        #: Seconds from the first event of a decision until its commands were written and carried out.
        self.latencies_s: deque[float] = deque(maxlen=20000)
        cluster = self._cluster = make_cluster(self.nodes, store)
        self.profiles = Profiles(
            self.jobs, self.nodes, store, self.outbox, self.take_in, lambda: self.scheduler, self.now_s
        )
        self.searches = Searches(
            self.profiles, self.outbox, self.warnings, self.take_in, lambda: self.scheduler.policy.elastic
        )
        made = self._policy()
        #: The scheduler of the last server replaces this one in `start`.
        self.scheduler: Scheduler = Scheduler(cluster, made, self._placer(made), cool_down_s=cool_down_s)
        self.sharing = Sharing(
            self, self.jobs, self.nodes, self.devices, self.outbox, self.profiles,
            share=share, pre_schedule=pre_schedule,
        )  # fmt: skip
        self.usage = Usage(
            self.jobs, self.nodes, executor, self.outbox, self.sharing.facts.shares, self.now_s
        )
        self._targets = Targets(self.jobs, self.outbox, self.metrics, self.nodes, self._explain)
        self.live_ledger = LiveLedger(store.get("ledger"), cluster, self.now_s())
        self._saver = Saver(store, self.live_ledger, self.jobs, self.now_s)
        self._parts = Parts(
            self.outbox, self.devices, executor, home, store, self.nodes, self.jobs, self.metrics,
            self.profiles, self.searches, self.sharing, self.drained, self.unmet, self.warnings,
        )  # fmt: skip
        fixed = FixedRunner(self, self._parts)
        self.elastic = ElasticRunner(self, self._parts)
        self.runners: dict[Resize, Runner] = {
            Resize.NEVER: fixed,
            Resize.RESTART: fixed,
            Resize.LIVE: self.elastic,
        }
        executor.on_exit = self._exited

    # -- starting and closing ----------------------------------------------------------------------

    async def start(self) -> None:
        """Continue where the last server stopped, or begin."""
        read_jobs(self.store, self.jobs, self.nodes, self.devices, self.warnings)
        self.scheduler = restored_scheduler(
            self.store, self.jobs, self.profiles.of, self.cluster, self._policy, self._placer,
            self.cool_down_s,
        )  # fmt: skip
        self.take_in(*self._missed_events())
        for runner in dict.fromkeys(self.runners.values()):
            await runner.open()
        for job in list(self.jobs.values()):
            for worker in list(job.workers.values()):
                self.executor.adopt(worker.id, self.worker_directory(job.id, worker.id))
        asyncio.get_running_loop().call_soon(self._continue)
        self._saver.start()
        self.usage.watch()

    def _continue(self) -> None:
        """Repeat earlier orders before deciding: a GPU must not get a new owner before the last one has left."""
        if self.stopping:
            return
        repeat_orders(self.jobs.values(), self.runners, self.executor)
        self.reconciler.flush()
        self.ready = True
        self.take_in(Timer())
        for job in self.jobs.values():
            self.soon(job)

    async def close(self, *, stop_jobs: bool) -> None:
        """Stop the server. Jobs continue without it, or are stopped and start again with the next server."""
        self.stopping = True  # nothing is decided any more
        if stop_jobs:
            await shutdown.stop_jobs(self.jobs, self.runners, self.executor, self.outbox)
        self._inbox.close()
        self.reconciler.close()
        self._saver.stop()
        self.usage.close()
        for runner in dict.fromkeys(self.runners.values()):
            await runner.close()
        self._saver.save()
        self.outbox.flush()

    # -- events in, decisions out ------------------------------------------------------------------

    def post(self, *events: Event) -> None:
        """Take in what a person asked for. The newest event of the store is the record of it."""
        self.take_in(*events, recorded_as=self.store.last_event_id)

    def take_in(self, *events: Event, recorded_as: int | None = None) -> None:
        """Decide on these events as soon as this turn of the event loop is over."""
        self._inbox.put(*events, recorded_as=recorded_as)

    def _cycle(self) -> None:
        """One cycle: decide, set the targets, decide about sharing, and carry it out."""
        if self.stopping:
            return
        taken, since = self._inbox.take()
        now_s, phases = self.now_s(), Phases()
        # 1. decide
        try:
            plan = self.scheduler.step(now_s, [event for event, _ in taken])
        except Exception as error:
            self._policy_failed(error)
            return
        self.metrics.decided(self.policy_name, phases.end("decide") / 1e3)
        self.decided_s = now_s
        # 2. turn the commands into targets, and account for the new shares
        self.outbox.snapshot_due()
        self.reconcile_next(*self._targets.apply(plan, self.policy_name, causes_of(taken)))
        self.live_ledger.observe(self.scheduler, now_s)
        self._inbox.wake_at(plan.wake_s, now_s)
        phases.end("targets")
        # 3. decide which jobs share a GPU
        self.sharing.decide(now_s)
        phases.end("sharing")
        # 4. reconcile the jobs that changed; write it all in one transaction; act
        self.settle()
        phases.end("settle")
        if plan.commands:
            self.latencies_s.append(time.perf_counter() - since)
        log.info(
            "cycle number=%d events=%d changes=%d %s", plan.number, len(taken), len(plan.commands), phases
        )
        self._inbox.cycle_done()

    def _explain(self, job: LiveJob) -> dict[str, Any] | None:
        """Why a job lacks GPUs after the last decision."""
        if job.id not in self.scheduler.view:
            return None
        reason = self.scheduler.outcome(job.id, self.now_s()).reason
        return None if reason is None else self.profiles.in_full(job, reason).model_dump()

    def _policy_failed(self, error: Exception) -> None:
        """Replace a policy that raises with fifo, so that the cluster keeps running."""
        log.exception("policy %s failed", self.policy_name)
        then = "it begins anew" if self.policy_name == "fifo" else "fifo decides instead"
        text = f"policy {self.policy_name} failed ({type(error).__name__}: {error}); {then}"
        self.warnings.append(text)
        self.outbox.event("policy.changed", text, policy="fifo")
        self.use_policy("fifo", {})

    def use_policy(self, name: str, options: dict[str, str]) -> None:
        """Decide by another policy from now on. Shares stay as they are until it changes them.

        A policy that cannot decide on the present jobs is refused with a ShoalError, and the old one stays.
        """
        self.scheduler = with_policy(
            self.scheduler, self.policy_name, name, lambda: make_policy(name, options), self._placer,
            cool_down_s=self.cool_down_s, now_s=self.now_s(),
        )  # fmt: skip
        self.policy_name, self.policy_options = name, options
        # The old policy may have failed between two events, so compare everything again.
        waiting, _ = self._inbox.take()
        gone = [event for event, _ in waiting if isinstance(event, (Finished, Cancelled))]
        self.take_in(*gone, *self._missed_events(), Timer())

    def _missed_events(self) -> list[Event]:
        return missed_events(
            self.scheduler,
            self.jobs,
            self.profiles.of,
            self.searches.cap_events,
            self.drained,
            tickets_of(self.store),
        )

    def _policy(self) -> Policy:
        return make_policy(self.policy_name, self.policy_options)

    def _placer(self, policy: Policy) -> Placer:
        setting = Setting(
            self._cluster,
            policy.elastic,
            lambda: self.scheduler.profiles,
            MOVE_S,
            may_move=lambda job_id: job_id in self.jobs and self.jobs[job_id].resize is Resize.LIVE,
            policy=policy.name,
        )
        return make_placer(self.placement, setting)

    @property
    def cluster(self) -> Cluster:
        return self.scheduler.cluster

    # -- carrying out ------------------------------------------------------------------------------

    @property
    def is_running(self) -> bool:
        """Whether decisions are made: the server has started and does not stop."""
        return self.ready and not self.stopping

    def _exited(self, exit_: Exit) -> None:
        """The executor saw a worker end."""
        job = self.jobs.get(int(exit_.worker.split(".")[0]))
        worker = job.workers.pop(exit_.worker, None) if job is not None else None
        now_s = self.now_s()
        self.outbox.worker(
            exit_.worker,
            state="ended",
            ended_s=now_s - (exit_.ago_s or 0.0),
            exit_code=exit_.code,
            signal=exit_.signal,
        )
        if job is None or worker is None:
            self.settle_soon()
            return
        if worker.device[0] >= 0:
            self.devices.take_back(worker.device, worker.id)
        job.colocated = job.colocated and not worker.colocated
        runner = self.runners[job.resize]
        with self.as_of(now_s - (exit_.ago_s or 0.0)):
            runner.holds(job)
            how = exit_.signal or ("" if exit_.code is None else f"exit code {exit_.code}") or exit_.why
            self.outbox.event(
                "worker.ended", f"worker {exit_.worker} ended: {how}", job,
                worker=exit_.worker, exit_code=exit_.code, signal=exit_.signal,
            )  # fmt: skip
            runner.exited(job, worker, exit_)
        self.gpus_freed()
        self.sharing.process_left()
        self.settle_soon()  # with whatever else ends in this turn

    def job_over(self, job: LiveJob) -> None:
        """The job has ended, and so has its last process."""
        self.metrics.job_over(job)
        self.usage.keep(job)
        self.profiles.keep(job)
        self.searches.forget(job)
        del self.jobs[job.id]
        self.unmet.discard(job.id)
        if job.id in self.scheduler.jobs:
            self.take_in(Finished(job.id))

    def withdraw(self, job: LiveJob) -> None:
        """Remove the job from the scheduler."""
        if job.id in self.scheduler.jobs:
            self.post(Cancelled(job.id))

    # -- what services ask of it -------------------------------------------------------------------

    def cancel(self, job: LiveJob) -> None:
        """Withdraw the job from the scheduler and end its workers."""
        self.withdraw(job)
        self.runners[job.resize].cancel(job)
        self.reconciler.flush()

    def hold(self, job: LiveJob) -> None:
        self.post(Held(job.id, True))

    def release(self, job: LiveJob) -> None:
        self.post(Held(job.id, False))
        self.soon(job)  # a co-located job may go on where it was

    def kill(self, worker_id: str) -> None:
        self.executor.stop(worker_id, kill=True)

    def ask_checkpoint(self, job: LiveJob) -> bool:
        """Ask the job's workers for a checkpoint. False if they cannot be asked."""
        if job.resize is Resize.LIVE:
            self.elastic.ask_checkpoint(job)
        return job.resize is Resize.LIVE

    def lose_node(self, node: int) -> None:
        self.drained.add(node)
        self.post(NodeLost(node))

    def node_back(self, node: int) -> None:
        self.drained.discard(node)
        self.post(NodeBack(node))

    def heartbeat_age_s(self) -> dict[str, float]:
        """By node: age of the oldest heartbeat of its workers."""
        return self.elastic.heartbeat_age_s()

    def _snapshot(self) -> dict[str, Any] | None:
        try:
            return snapshot.encode(self.scheduler)
        except Exception:  # a policy that someone else wrote
            log.exception("the state of policy %s cannot be saved", self.policy_name)
            return None

    def worker_directory(self, job_id: int, worker_id: str) -> Path:
        return self._parts.worker_directory(job_id, worker_id)
