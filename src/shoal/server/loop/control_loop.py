"""The control loop: it asks the scheduler for decisions and carries them out.

It owns the scheduler, the live jobs and the GPUs, and runs in the thread of one event loop. A decision follows
an event at once; events that arrive during a cycle, or within `inbox.COALESCE_S` of it, are decided together.
Decisions are written before they are carried out (`outbox`), so the server can be killed at any moment: the
next one reads from the store what was decided, learns from the executor what runs, and continues. See
docs/design/030-server.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

from shoal.core.cluster import Cluster
from shoal.core.events import (
    Cancelled,
    Event,
    Finished,
    Held,
    Timer,
)
from shoal.core.limits import MONDAY_S
from shoal.core.plan import Placement
from shoal.executors.base import Executor, Exit, OwnAccount, RunAs
from shoal.placement.pinned_placer import PinnedPlacer
from shoal.placement.placer import Placer
from shoal.placement.registry import Setting, make_placer
from shoal.policies.base import Policy
from shoal.policies.registry import make_policy
from shoal.scheduler.exploration.exploration import SHARE
from shoal.scheduler.scheduler import Scheduler
from shoal.server.api.models import JobState, Resize
from shoal.server.home import Home
from shoal.server.loop import shutdown, snapshot
from shoal.server.loop.caps import Caps
from shoal.server.loop.causes import causes_of
from shoal.server.loop.ceilings import Ceilings
from shoal.server.loop.clock import Clock
from shoal.server.loop.devices import Devices
from shoal.server.loop.elastic_runner import ElasticRunner
from shoal.server.loop.endings import Endings
from shoal.server.loop.event_time import EventTime
from shoal.server.loop.exploring import make_exploration, record_trials
from shoal.server.loop.fixed_runner import FixedRunner
from shoal.server.loop.idle import Idle, IdleRule
from shoal.server.loop.inbox import Inbox
from shoal.server.loop.live_job import LEAVING, LiveJob
from shoal.server.loop.live_ledger import LiveLedger
from shoal.server.loop.node_table import KEY as NODES
from shoal.server.loop.node_table import TO_COME, NodeTable
from shoal.server.loop.node_watch import NodeWatch
from shoal.server.loop.outbox import Outbox
from shoal.server.loop.phases import Phases
from shoal.server.loop.policy_change import first_decisions, rehearsal, with_nodes, with_policy
from shoal.server.loop.profiles import Profiles
from shoal.server.loop.reconciler import Reconciler
from shoal.server.loop.restart import (
    make_cluster,
    missed_events,
    read_jobs,
    repeat_orders,
    restored_scheduler,
)
from shoal.server.loop.restarts import Restarts
from shoal.server.loop.runner import Addresses, Parts, Runner, last_words
from shoal.server.loop.saver import Saver
from shoal.server.loop.searches import Searches
from shoal.server.loop.sharing.sharing import Sharing
from shoal.server.loop.targets import Targets
from shoal.server.loop.usage import Usage
from shoal.server.metrics import Metrics
from shoal.server.record_check import continue_worker_ids, forget_left_secrets
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
        account_of: Callable[[str], RunAs] = lambda user: OwnAccount(),
        cool_down_s: float = COOL_DOWN_S,
        explore: float = SHARE,
        idle: IdleRule | None = None,
        addresses: Addresses | None = None,
    ) -> None:
        self.store, self.executor, self.home, self.clock = store, executor, home, clock
        self.now_s = clock.now_s
        self.cool_down_s, self.explore = cool_down_s, explore
        self.table = NodeTable(
            store.get(NODES, []), executor.nodes(), executor.awaited_nodes(), store.get("drained", []),
            store.get(TO_COME),
        )  # fmt: skip
        self.nodes = self.table.infos
        self.policy_name, self.policy_options = policy, policy_options or {}
        self.placement = placement
        self.jobs: dict[int, LiveJob] = {}
        self.devices = Devices(n.gpus for n in self.nodes)
        self.outbox = Outbox(store, clock.now_s, self._snapshot, self.table.named)
        self.metrics = Metrics()
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
        cluster = self._cluster = make_cluster(self.table, store)
        self.profiles = Profiles(
            self.jobs, self.nodes, store, self.outbox, self.take_in, lambda: self.scheduler, self.now_s
        )
        self.searches = Searches(
            self.profiles, self.outbox, self.warnings, self.take_in, lambda: self.scheduler.policy.elastic
        )
        #: The scheduler of the last server replaces this one in `start`.
        self.scheduler: Scheduler = self._new_scheduler()
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
        self.caps = Caps(self.take_in)
        self.restarts = Restarts(
            self.jobs, self.outbox, self.take_in, self.soon, self.now_s, self.caps,
            lambda: self.scheduler.policy.elastic,
        )  # fmt: skip
        self._parts = Parts(
            self.outbox, self.devices, executor, home, store, self.nodes, self.jobs, self.metrics,
            self.profiles, self.searches, self.sharing, self.restarts,
            Ceilings(self.jobs, self.nodes, lambda: self.scheduler.cluster), self.table.out_of_use,
            self.table.leaving, self.unmet, self.warnings, addresses or Addresses(), account_of,
        )  # fmt: skip
        self.endings = Endings(self, self.jobs, store, self.outbox)
        self.idle = Idle(self, self.jobs, executor, self.outbox, idle or IdleRule())
        fixed = FixedRunner(self, self._parts)
        self.elastic = ElasticRunner(self, self._parts)
        self.runners: dict[Resize, Runner] = {
            Resize.NEVER: fixed,
            Resize.RESTART: fixed,
            Resize.LIVE: self.elastic,
        }
        self.node_watch = NodeWatch(self, self.table, self.devices, self.outbox)
        executor.on_exit, executor.on_node = self._exited, self.node_watch.take

    # -- starting and closing ----------------------------------------------------------------------

    async def start(self) -> None:
        """Continue where the last server stopped, or begin."""
        read_jobs(self.store, self.jobs, self.table, self.devices, self.warnings)
        continue_worker_ids(self.home, self.jobs.values())
        forget_left_secrets(self.home, self.store, self.jobs)
        self.scheduler = restored_scheduler(
            self.store, self.jobs, self.profiles.of, self.cluster, self._policy, self._placer,
            self.cool_down_s, make_exploration(self.explore),
        )  # fmt: skip
        self.node_watch.start()
        self.take_in(*self._missed_events())
        self.restarts.open()
        for runner in dict.fromkeys(self.runners.values()):
            await runner.open()
        for job in list(self.jobs.values()):
            for worker in list(job.workers.values()):
                self.executor.adopt(worker.id, self.worker_directory(job.id, worker.id))
        asyncio.get_running_loop().call_soon(self._continue)
        self._saver.start()
        self.usage.watch()
        self.endings.start()
        self.idle.start(self.scheduler.caps)

    def _continue(self) -> None:
        """Repeat earlier orders before deciding: a GPU must not get a new owner before the last one has left."""
        if self.stopping:
            return
        repeat_orders(self.jobs.values(), self.runners, self.executor)
        self.reconciler.flush()
        self.ready = True
        self.take_in(Timer())
        self.endings.begin()
        for job in self.jobs.values():
            self.soon(job)

    async def close(self, *, stop_jobs: bool) -> None:
        """Stop the server. Jobs continue without it, or are stopped and start again with the next server."""
        self.stopping = True  # nothing is decided any more
        if stop_jobs:
            await shutdown.stop_jobs(self.jobs, self.runners, self.executor, self.outbox)
            self.live_ledger.pause(self.now_s())
        self.node_watch.close()
        self._inbox.close()
        self.reconciler.close()
        self.restarts.close()
        self._saver.stop()
        self.usage.close()
        self.endings.close()
        self.idle.close()
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
        record_trials(plan, self.jobs, self.outbox)
        self.reconcile_next(*self._targets.apply(plan, self.policy_name, causes_of(taken)))
        # commands take effect now, not when the decision began
        self.live_ledger.observe(self.scheduler, self.now_s())
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
        if job.id not in self.scheduler.jobs:
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

    def _new_scheduler(self) -> Scheduler:
        policy = self._policy()
        return Scheduler(
            self._cluster,
            policy,
            self._placer(policy),
            cool_down_s=self.cool_down_s,
            week_begin_s=MONDAY_S,
            exploration=make_exploration(self.explore),
        )

    async def compile_first(self) -> None:
        """Before `start`: compile what the first decisions need, while the process does other things."""
        with contextlib.suppress(Exception):  # the first decision on real jobs reports what is wrong
            scheduler = self._new_scheduler()
            await asyncio.to_thread(first_decisions, scheduler)
            await asyncio.to_thread(LiveLedger(None, scheduler.cluster, 0.0).observe, scheduler, 1.0)

    async def compile_policy(self, name: str, options: dict[str, str]) -> None:
        """Let a policy make its first decision on a copy, so that `use_policy` need not wait for its kernels."""
        policy = make_policy(name, options)
        first = rehearsal(
            self.scheduler, policy, self._placer(policy), cool_down_s=self.cool_down_s, now_s=self.now_s()
        )
        with contextlib.suppress(Exception):  # `use_policy` reports what is wrong
            await asyncio.to_thread(first)

    def use_policy(self, name: str, options: dict[str, str]) -> None:
        """Decide by another policy from now on. Shares stay as they are until it changes them.

        A policy that cannot decide on the present jobs is refused with a ShoalError, and the old one stays.
        """
        self.scheduler = with_policy(
            self.scheduler, self.policy_name, name, lambda: make_policy(name, options), self._placer,
            cool_down_s=self.cool_down_s, now_s=self.now_s(), exploration=make_exploration(self.explore),
        )  # fmt: skip
        self.policy_name, self.policy_options = name, options
        self._compare_again()

    def nodes_changed(self, replaced: Set[str]) -> None:
        """Decide for the nodes that the table has now. Shares stay as they are until a decision changes them."""
        self._cluster = make_cluster(self.table, self.store)
        self.scheduler = with_nodes(
            self.scheduler, self._cluster, replaced, self._policy, self._placer,
            cool_down_s=self.cool_down_s, exploration=make_exploration(self.explore),
        )  # fmt: skip
        self.live_ledger.use_types(self.scheduler.cluster.gpu_types, self.now_s())
        self.profiles.nodes_changed()
        self._compare_again()

    def expect_gpus(self, to_come: Mapping[str, int]) -> None:
        """An engine could provide machines with so many GPUs of each type, at most."""
        if self.table.to_come != to_come:
            self.table.to_come = dict(to_come)
            self.outbox.setting(TO_COME, self.table.to_come)
            self.nodes_changed(set())

    def _compare_again(self) -> None:
        """Another scheduler decides from now on. Tell it everything that it does not know."""
        # The old policy may have failed between two events.
        waiting, _ = self._inbox.take()
        gone = [event for event, _ in waiting if isinstance(event, (Finished, Cancelled))]
        self.take_in(*gone, *self._missed_events(), Timer())

    def _missed_events(self) -> list[Event]:
        return missed_events(
            self.scheduler,
            self.jobs,
            self.profiles.of,
            self.searches.cap_events,
            self.table.out_of_cluster,
            self.store,
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
        # A function, not a method: a copy of the scheduler must not copy the server.
        return PinnedPlacer(make_placer(self.placement, setting), lambda: self._pins())

    def _pins(self) -> dict[int, Placement]:
        """Where jobs are whose processes can only be suspended: they cannot continue anywhere else."""
        return {
            job.id: tuple(sorted(Counter(d[0] for w in job.workers.values() for d in w.devices).items()))
            for job in self.jobs.values()
            if job.resize is Resize.NEVER and job.workers
            if all(w.state != LEAVING for w in job.workers.values())
        }

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
        for device in worker.devices if worker.device[0] >= 0 else ():
            self.devices.take_back(device, worker.id)
        job.colocated = job.colocated and not worker.colocated
        runner = self.runners[job.resize]
        with self.as_of(now_s - (exit_.ago_s or 0.0)):
            runner.holds(job)
            how = exit_.signal or ("" if exit_.code is None else f"exit code {exit_.code}") or exit_.why
            failed = not exit_.ok and exit_.began and not exit_.asked_to_end
            last = last_words(self.worker_directory(job.id, worker.id)) if failed else []
            if exit_.code and last and not exit_.why:
                exit_ = replace(exit_, why=last[-1].strip()[:300])
            self.outbox.event(
                "worker.ended", f"worker {exit_.worker} ended: {how}", job,
                worker=exit_.worker, exit_code=exit_.code, signal=exit_.signal,
                **({"output": "\n".join(last)[-4000:]} if last else {}),
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
        self.outbox.effect(lambda: self.home.forget_secrets(job.id))
        del self.jobs[job.id]
        self.unmet.discard(job.id)
        if job.id in self.scheduler.jobs:
            self.take_in(Finished(job.id, job.life.state is JobState.SUCCEEDED))
        self.endings.job_over(job)

    def withdraw(self, job: LiveJob) -> None:
        """Remove the job from the scheduler."""
        if job.id in self.scheduler.jobs:
            self.post(Cancelled(job.id, ended=False))

    # -- what services ask of it -------------------------------------------------------------------

    def cancel(self, job: LiveJob) -> None:
        """Withdraw the job from the scheduler and end its workers."""
        self.withdraw(job)
        self.runners[job.resize].cancel(job)
        self.reconciler.flush()

    def hold(self, job: LiveJob) -> None:
        self.post(Held(job.id, True))

    def release(self, job: LiveJob) -> None:
        self.restarts.end_rest(job)
        self.post(Held(job.id, False))
        self.soon(job)  # a co-located job may go on where it was

    def kill(self, worker_id: str) -> None:
        self.executor.stop(worker_id, kill=True)

    def warn(self, worker_id: str, signal: str) -> None:
        self.executor.warn(worker_id, signal)

    def ask_checkpoint(self, job: LiveJob) -> bool:
        """Ask the job's workers for a checkpoint. False if they cannot be asked."""
        if job.resize is Resize.LIVE:
            self.elastic.ask_checkpoint(job)
        return job.resize is Resize.LIVE

    def lose_node(self, node: int) -> None:
        """A person drains a node."""
        self.node_watch.drain(node, True)

    def node_back(self, node: int) -> None:
        self.node_watch.drain(node, False)

    def drained_names(self) -> list[str]:
        return self.table.drained_names

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
