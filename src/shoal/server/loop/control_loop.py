"""The control loop: it asks the scheduler for decisions and carries them out.

It owns the scheduler, the live jobs and the GPUs, and runs in the thread of one event loop. A decision follows
an event at once; events that arrive during a cycle, or within `COALESCE_S` of it, are decided together.
Decisions are written before they are carried out (`outbox`), so the server can be killed at any moment: the
next one reads from the store what was decided, learns from the executor what runs, and continues. See
docs/design/030-server.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from shoal.core.cluster import Cluster
from shoal.core.errors import ShoalError
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
from shoal.scheduler.saved import restore, save
from shoal.scheduler.scheduler import Scheduler
from shoal.server.api.models import JobState, Resize
from shoal.server.home import Home
from shoal.server.loop import snapshot
from shoal.server.loop.causes import causes_of
from shoal.server.loop.clock import Clock
from shoal.server.loop.devices import Devices
from shoal.server.loop.elastic_runner import ElasticRunner
from shoal.server.loop.fixed_runner import FixedRunner
from shoal.server.loop.live_job import LEAVING, SUSPENDED, LiveJob
from shoal.server.loop.live_ledger import LiveLedger
from shoal.server.loop.outbox import Outbox
from shoal.server.loop.phases import Phases
from shoal.server.loop.profiles import Profiles
from shoal.server.loop.restart import (
    adopt_worker,
    make_cluster,
    missed_events,
    restored_scheduler,
    save_regularly,
    tickets_of,
)
from shoal.server.loop.runner import Parts, Runner
from shoal.server.loop.searches import Searches
from shoal.server.loop.sharing import Sharing
from shoal.server.loop.targets import Targets
from shoal.server.loop.usage import Usage
from shoal.server.metrics import Metrics
from shoal.server.store.store import Store

log = logging.getLogger("shoal.server")

COALESCE_S = 0.02
COOL_DOWN_S = 10.0
SAVE_S = 5.0
#: The cost of a migration that placements assume, in seconds without progress: far more than the pause of a switch.
MOVE_S = 5.0
RETRY_S = 1.0


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
        #: Events to decide on, each with the id of the store's event that records it, if one does.
        self._inbox: list[tuple[Event, int | None]] = []
        self._inbox_since = 0.0
        self._changed: set[int] = set()
        self._then_s: float | None = None
        self._cycle_at: asyncio.TimerHandle | asyncio.Handle | None = None
        self._settle_at: asyncio.Handle | None = None
        self._wake: asyncio.TimerHandle | None = None
        self._retry: asyncio.TimerHandle | None = None
        self._last_cycle_s = 0.0
        self._saver: asyncio.Task[None] | None = None
        #: Seconds from the first event of a decision until its commands were written and carried out.
        self.latencies_s: deque[float] = deque(maxlen=20000)
        cluster = make_cluster(self.nodes, store)
        self.profiles = Profiles(
            self.jobs, self.nodes, store, self.outbox, self.take_in, lambda: self.scheduler, self.now_s
        )
        self.searches = Searches(
            self.profiles, self.outbox, self.warnings, self.take_in, lambda: self.scheduler.policy.elastic
        )
        self._cluster = cluster
        made = self._policy()
        #: The scheduler of the last server replaces this one in `start`.
        self.scheduler = Scheduler(cluster, made, self._placer(made), cool_down_s=cool_down_s)
        self.sharing = Sharing(
            self, self.jobs, self.nodes, self.devices, self.outbox, self.profiles,
            share=share, pre_schedule=pre_schedule,
        )  # fmt: skip
        self.usage = Usage(self.jobs, self.nodes, executor, self.outbox, self.sharing.shares, self.now_s)
        self._targets = Targets(self.jobs, self.outbox, self.metrics, self.nodes, self._explain)
        self.live_ledger = LiveLedger(store.get("ledger"), cluster, self.now_s())
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

    # -- making and restoring ----------------------------------------------------------------------

    async def start(self) -> None:
        """Continue where the last server stopped, or begin."""
        rows = self.store.active_jobs()
        for row in rows:
            self.jobs[row["id"]] = LiveJob.from_row(row)
        for row in self.store.unended_workers():
            adopt_worker(row, self.jobs.get(row["job"]), self.nodes, self.devices, self.warnings)
        self.scheduler = restored_scheduler(
            self.store,
            self.jobs,
            self.profiles.of,
            self.cluster,
            self._policy,
            self._placer,
            self.cool_down_s,
        )
        self.take_in(*self._missed_events())
        for runner in dict.fromkeys(self.runners.values()):
            await runner.open()
        for job in list(self.jobs.values()):
            for worker in list(job.workers.values()):
                self.executor.adopt(worker.id, self.worker_directory(job.id, worker.id))
        asyncio.get_running_loop().call_soon(self._go_on)
        self._saver = asyncio.create_task(self._save_regularly())
        self.usage.watch()

    def _go_on(self) -> None:
        """Repeat earlier orders before deciding: a GPU must not get a new owner while the last has yet to leave."""
        if self.stopping:
            return
        self._repeat_orders()
        self.ready = True
        self.take_in(Timer())
        for job in self.jobs.values():
            self.soon(job)

    def _repeat_orders(self) -> None:
        """Repeat the orders that the last server may have been killed before giving."""
        for job in list(self.jobs.values()):
            if job.life.state is JobState.STOPPING:
                self.runners[job.resize].cancel(job)
            elif job.ending is not None and not job.workers:
                self.runners[job.resize].conclude_rest(job)
            for worker in list(job.workers.values()):
                if worker.state == LEAVING:
                    self.executor.stop(worker.id)
                elif worker.state == SUSPENDED:
                    self.executor.suspend(worker.id)
            self.runners[job.resize].repeat_orders(job)
        self._flush()

    # -- events in, decisions out ------------------------------------------------------------------

    def post(self, *events: Event) -> None:
        """Take in what a person asked for. The newest event of the store is the record of it."""
        self.take_in(*events, recorded_as=self.store.last_event_id)

    def take_in(self, *events: Event, recorded_as: int | None = None) -> None:
        """Decide on these events as soon as this turn of the event loop is over."""
        if not self._inbox:
            self._inbox_since = time.perf_counter()
        self._inbox += [(event, recorded_as) for event in events]
        if self._cycle_at is None and self.ready and not self.stopping:
            loop = asyncio.get_running_loop()
            wait_s = self._last_cycle_s + COALESCE_S - loop.time()
            self._cycle_at = (
                loop.call_later(wait_s, self._cycle) if wait_s > 0 else loop.call_soon(self._cycle)
            )

    def _cycle(self) -> None:
        self._cycle_at = None
        if self.stopping:
            return
        taken, since, self._inbox = self._inbox, self._inbox_since, []
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
        self._changed.update(self._targets.apply(plan, self.policy_name, causes_of(taken)))
        self.live_ledger.observe(self.scheduler, now_s)
        self._wake_at(plan.wake_s, now_s)
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
        self._last_cycle_s = asyncio.get_running_loop().time()

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
        """Decide by another policy from now on. Shares stay as they are until it says otherwise.

        One that cannot decide on the jobs there are is refused with a ShoalError, and the old one stays.
        """
        before = self.policy_name, self.policy_options, self.scheduler
        self.policy_name, self.policy_options = name, options
        try:
            self.scheduler = self._under_new_policy(self.scheduler)
            copy.deepcopy(self.scheduler).step(self.now_s(), [Timer()])
        except Exception as error:
            self.policy_name, self.policy_options, self.scheduler = before
            if isinstance(error, ShoalError):
                raise
            log.exception("policy %s failed at its first decision", name)
            what = f"{type(error).__name__}: {error}".rstrip(": ")
            raise ShoalError(f"policy {name} fails ({what}), so {before[0]} stays in force") from error
        # A policy that failed may have failed between two events, so all of them are found again.
        gone = [e for e, _ in self._inbox if isinstance(e, (Finished, Cancelled))]
        self._inbox = []
        self.take_in(*gone, *self._missed_events(), Timer())

    def _under_new_policy(self, before: Scheduler) -> Scheduler:
        """A scheduler with the shares of the present one and a policy without a state."""
        saved, policy = save(before), self._policy()
        saved |= {"policy": None, "policy_state": None}
        return restore(
            saved, before.cluster, policy, before.jobs, before.profiles, self._placer(policy),
            cool_down_s=self.cool_down_s,
        )  # fmt: skip

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

    def _wake_at(self, wake_s: float, now_s: float) -> None:
        if self._wake is not None:
            self._wake.cancel()
            self._wake = None
        if np.isfinite(wake_s):
            delay_s = max(wake_s - now_s, COALESCE_S)
            self._wake = asyncio.get_running_loop().call_later(delay_s, self.take_in, Timer())

    # -- carrying out ------------------------------------------------------------------------------

    def soon(self, job: LiveJob) -> None:
        """See to this job when the present turn of the loop is over."""
        self._changed.add(job.id)
        self.settle_soon()

    def settle_soon(self) -> None:
        if self._settle_at is None:
            self._settle_at = asyncio.get_running_loop().call_soon(self.settle)

    def reconcile_next(self, job_id: int) -> None:
        """See to this job the next time that jobs are reconciled."""
        self._changed.add(job_id)

    @property
    def is_running(self) -> bool:
        """Whether decisions are made: the server has started and does not stop."""
        return self.ready and not self.stopping

    def gpus_freed(self) -> None:
        """Reconcile the jobs that wait for GPUs."""
        for job_id in self.unmet:
            if job_id in self.jobs:
                self.soon(self.jobs[job_id])

    def settle(self) -> None:
        """Move every job that changed towards its target, those that release GPUs first."""
        if self._settle_at is not None:
            self._settle_at.cancel()
            self._settle_at = None
        if not self.ready:
            return
        self._reconcile()
        if self.sharing.stale and not self.stopping:
            self.sharing.decide(self.now_s())
            self._reconcile()
        self._flush()

    def _reconcile(self) -> None:
        changed, self._changed = self._changed, set()
        jobs = [self.jobs[i] for i in sorted(changed) if i in self.jobs and not self.jobs[i].is_over]
        if not self.stopping:
            for job in sorted(jobs, key=lambda j: j.target_gpus >= j.gpus and not j.is_to_leave):
                self.runners[job.resize].reconcile(job)

    def _flush(self) -> None:
        if self.outbox.flush():
            return
        if self._retry is None:
            self._retry = asyncio.get_running_loop().call_later(RETRY_S, self._try_again)

    def _try_again(self) -> None:
        self._retry = None
        self._flush()

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
        self.sharing.look_again()
        self.settle_soon()  # with whatever else ends in this turn

    @contextlib.contextmanager
    def as_of(self, then_s: float) -> Iterator[None]:
        """What is taken in within this context happened at `then_s`, perhaps while no server ran."""
        self._then_s = then_s
        try:
            yield
        finally:
            self._then_s = None

    def then_s(self, job: LiveJob) -> float:
        """The time of what is being taken in: now, unless `as_of` says otherwise."""
        now_s = self.now_s()
        return now_s if self._then_s is None else min(max(self._then_s, job.life.settled_s), now_s)

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
        self._flush()

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

    # -- time and memory ---------------------------------------------------------------------------

    async def _save_regularly(self) -> None:
        while True:
            await asyncio.sleep(SAVE_S)
            self._save()

    def _save(self) -> None:
        live = [job for job in self.jobs.values() if job.resize is Resize.LIVE]
        now_s = self.now_s()
        try:
            save_regularly(self.store, self.live_ledger.state(now_s), live, now_s)
        except ShoalError as error:
            log.error("cannot save: %s", error)

    def _snapshot(self) -> dict[str, Any] | None:
        try:
            return snapshot.encode(self.scheduler)
        except Exception:  # a policy that someone else wrote
            log.exception("the state of policy %s cannot be saved", self.policy_name)
            return None

    def worker_directory(self, job_id: int, worker_id: str) -> Path:
        return self._parts.worker_directory(job_id, worker_id)

    async def close(self, *, stop_jobs: bool) -> None:
        """Stop the server. Jobs run on without it, or are stopped and start again with the next server."""
        if stop_jobs:
            await self._stop_jobs()
        self.stopping = True
        for handle in (self._cycle_at, self._settle_at, self._wake, self._retry):
            if handle is not None:
                handle.cancel()
        if self._saver is not None:
            self._saver.cancel()
        self.usage.close()
        for runner in dict.fromkeys(self.runners.values()):
            await runner.close()
        self._save()
        self.outbox.flush()

    async def _stop_jobs(self) -> None:
        """Release every GPU: live jobs save their state, others are stopped."""
        self.stopping = True  # nothing is decided any more
        for job in list(self.jobs.values()):
            self.runners[job.resize].shut_down(job)
        self.outbox.flush()
        longest_s = max((j.spec["grace_s"] for j in self.jobs.values() if j.workers), default=0.0)
        deadline = asyncio.get_running_loop().time() + longest_s + 30.0
        while any(j.workers for j in self.jobs.values()):
            if asyncio.get_running_loop().time() > deadline:
                for job in self.jobs.values():
                    for worker in job.workers.values():
                        self.executor.stop(worker.id, kill=True)
                deadline += 10.0
            await asyncio.sleep(0.05)
        self.outbox.flush()
