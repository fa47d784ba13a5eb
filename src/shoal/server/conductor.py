"""The conductor: decides with the scheduler and has it carried out.

It owns the scheduler, the live jobs and the GPUs. Everything happens in the thread of one loop. A decision follows
an event at once; what arrives while one is being made, or within `COALESCE_S` of it, is decided on together.
What it decides is written down before it is done (`outbox`), so that it can be killed at any moment: the next one
finds in the store what was to be and at the executor what is, and goes on from there.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shoal.core.cluster import Cluster, Node, User
from shoal.core.errors import ShoalError
from shoal.core.events import (
    Cancelled,
    Event,
    Finished,
    Held,
    NodeBack,
    NodeLost,
    Submitted,
    TicketsChanged,
    Timer,
)
from shoal.core.ledger import Ledger
from shoal.core.plan import Reconfigure
from shoal.executors.base import Executor, Exit
from shoal.placement.keep_and_pack import KeepAndPack
from shoal.policies.registry import make_policy
from shoal.scheduler.scheduler import Scheduler
from shoal.server.clock import Clock
from shoal.server.crew import Crew
from shoal.server.devices import Devices
from shoal.server.elastic import Elastic
from shoal.server.gang import Gang
from shoal.server.home import Home
from shoal.server.live_job import LEAVING, STOPPED, LiveJob, LiveWorker
from shoal.server.metrics import Metrics
from shoal.server.models import JobState, Resize
from shoal.server.models import Reason as ReasonModel
from shoal.server.outbox import Outbox
from shoal.server.profiles import Profiles
from shoal.server.store import Store

log = logging.getLogger("shoal.server")

COALESCE_S = 0.02
COOL_DOWN_S = 10.0
SAVE_S = 5.0
RETRY_S = 1.0
#: Of one decision: how many gainers are named to a loser, and how many losers get the numbers behind it.
MOST_NAMED, MOST_EXPLAINED = 5, 50


class Conductor:
    def __init__(
        self,
        store: Store,
        executor: Executor,
        home: Home,
        clock: Clock,
        *,
        policy: str,
        policy_options: dict[str, str] | None = None,
        cool_down_s: float = COOL_DOWN_S,
    ) -> None:
        self.store, self.executor, self.home, self.clock = store, executor, home, clock
        self.now_s = clock.now_s
        self.cool_down_s = cool_down_s
        self.nodes = executor.nodes()
        self.policy_name, self.policy_options = policy, policy_options or {}
        self.jobs: dict[int, LiveJob] = {}
        self.devices = Devices(n.gpus for n in self.nodes)
        self.outbox = Outbox(store, clock.now_s)
        self.metrics = Metrics()
        #: Nodes that are out of use, by index.
        out_of_use = set(store.get("drained", []))
        self.drained = {i for i, node in enumerate(self.nodes) if node.name in out_of_use}
        #: Jobs that wait for GPUs which others have not let go yet.
        self.unmet: set[int] = set()
        self.warnings: list[str] = []
        self.decided_s: float | None = None
        #: Nothing is decided or carried out before all of the last server's jobs and workers are known.
        self.ready = False
        self.stopping = False
        self._inbox: list[Event] = []
        self._inbox_since = 0.0
        self._changed: set[int] = set()
        self._then_s: float | None = None
        self._cycle_at: asyncio.TimerHandle | asyncio.Handle | None = None
        self._settle_at: asyncio.Handle | None = None
        self._wake: asyncio.TimerHandle | None = None
        self._retry: asyncio.TimerHandle | None = None
        self._last_cycle_s = 0.0
        self._saver: asyncio.Task[None] | None = None
        #: From the first of the events that led to a decision until its commands were on record and given.
        self.latencies_s: deque[float] = deque(maxlen=20000)
        self.cluster = self._make_cluster()
        self.profiles = Profiles(self)
        self.scheduler = self._make_scheduler()
        self.ledger = self._make_ledger()
        gang = Gang(self)
        elastic = Elastic(self)
        self.crews: dict[Resize, Crew] = {Resize.NEVER: gang, Resize.RESTART: gang, Resize.LIVE: elastic}
        executor.on_exit = self._exited

    # -- making and restoring ----------------------------------------------------------------------

    def _make_cluster(self) -> Cluster:
        nodes = tuple(Node(n.name, n.gpus, n.gpu_type, n.rack, n.domain) for n in self.nodes)
        tickets = {u["name"]: u["tickets"] for u in self.store.users()}
        # Accounts of the ledger go by position: who was there before keeps theirs.
        before = (self.store.get("ledger") or {}).get("state", {}).get("users", [])
        names = dict.fromkeys([*before, *tickets])
        return Cluster(nodes, tuple(User(name, tickets.get(name, 1.0)) for name in names))

    def _make_scheduler(self) -> Scheduler:
        policy = make_policy(self.policy_name, self.policy_options)
        placer = KeepAndPack(all_or_nothing=not policy.elastic)
        scheduler = Scheduler(self.cluster, policy, placer, cool_down_s=self.cool_down_s)
        scheduler.lose_nodes(self.drained)
        return scheduler

    def _make_ledger(self) -> Ledger:
        types, now_s = self.cluster.gpu_types, self.now_s()
        saved = self.store.get("ledger")
        if saved and saved.get("gpu_types") == list(types):
            ledger = Ledger.restored(saved["state"], types)
            self.ledger_since_s: float = saved["since_s"]
            ledger.settle(now_s)
        else:
            ledger = Ledger((), types, start_s=now_s)
            self.ledger_since_s = now_s
        return ledger

    async def start(self) -> None:
        """Go on from where the last server was, or begin."""
        rows = self.store.active_jobs()
        for row in rows:
            self.jobs[row["id"]] = LiveJob.from_row(row)
        for row in self.store.unended_workers():
            self._remember(row)
        self._fill_scheduler(restore=True)
        for crew in dict.fromkeys(self.crews.values()):
            await crew.open()
        for job in list(self.jobs.values()):
            for worker in list(job.workers.values()):
                self.executor.adopt(worker.id, self.worker_directory(job.id, worker.id))
        asyncio.get_running_loop().call_soon(self._go_on)
        self.save()
        self._saver = asyncio.create_task(self._save_regularly())

    def _remember(self, row: dict[str, Any]) -> None:
        job = self.jobs.get(row["job"])
        node = next((i for i, n in enumerate(self.nodes) if n.name == row["node"]), None)
        if job is None or node is None or row["gpu"] >= self.nodes[node].gpus:
            # The cluster has shrunk since: its process is ended, its place is gone.
            self.warnings.append(f"worker {row['id']} was on a GPU that is no longer there; it is ended")
            node = None
        device = (node if node is not None else -1, row["gpu"])
        worker = LiveWorker(row["id"], device, row["node"], row["started_s"], row["rank"], row["state"])
        if job is None:
            return
        job.workers[worker.id] = worker
        if node is None:
            worker.state = LEAVING
        elif worker.state != STOPPED:
            self.devices.give(device, worker.id)

    def _go_on(self) -> None:
        """First what was decided before: no GPU may be given away that its last owner was only to be told to leave."""
        if self.stopping:
            return
        self._repeat_orders()
        self.ready = True
        self.post(Timer())
        for job in self.jobs.values():
            self.soon(job)

    def _repeat_orders(self) -> None:
        """What the last server may have been killed before saying."""
        for job in list(self.jobs.values()):
            if job.life.state is JobState.STOPPING:
                self.crews[job.resize].cancel(job)
            elif job.ending is not None and not job.workers:
                self.crews[job.resize].conclude_rest(job)
            for worker in list(job.workers.values()):
                if worker.state == LEAVING:
                    self.executor.stop(worker.id)
                elif worker.state == STOPPED:
                    self.executor.suspend(worker.id)
        self._flush()

    def _fill_scheduler(self, *, restore: bool) -> None:
        """Tell a new scheduler of all jobs and of what they have."""
        now_s, scheduler = self.now_s(), self.scheduler
        saved = self.store.get("scheduler") if restore else None
        memory = saved["rows"] if saved and saved["policy"] == self.policy_name else {}
        if memory:
            try:
                scheduler.policy.restore(saved["state"])
            except Exception:
                log.exception("the policy could not go on from its saved state; it begins anew")
        for job in sorted(self.jobs.values(), key=lambda j: j.id):
            if job.life.state is JobState.STOPPING:
                continue
            core, profile = self.profiles.of(job)
            scheduler._take_in(Submitted(job.id, core, profile), now_s)
            self._adopt_share(job, memory.get(str(job.id)), now_s)
            if job.life.state is JobState.PAUSED:
                scheduler._take_in(Held(job.id, True), now_s)
            self.profiles.tell_length(job)
        scheduler.plans = max(scheduler.plans, int(self.store.get("plans", 0)))

    def _adopt_share(self, job: LiveJob, memory: list[float] | None, now_s: float) -> None:
        view, scheduler = self.scheduler.view, self.scheduler
        row = view.row(job.id)
        view.submit_s[row] = job.life.submitted_s
        view.attained_gpu_s[row] = job.life.gpu_s
        view.generation[row] = job.generation
        if job.life.started_s is not None:
            view.first_start_s[row] = view.last_start_s[row] = job.life.started_s
        if memory:
            view.memory_a[row], view.memory_b[row], view.memory_c[row] = memory
        fits = all(
            node < len(self.nodes) and node not in self.drained and g <= self.nodes[node].gpus
            for node, g in job.target.items()
        )
        if not fits:
            job.target = {}
        if job.target and job.life.state is not JobState.PAUSED:
            view.gpus[row] = job.target_gpus
            view.gpu_type[row] = self.cluster.type_of_node[next(iter(job.target))]
            scheduler.placements[job.id] = tuple(sorted(job.target.items()))

    # -- events in, decisions out ------------------------------------------------------------------

    def post(self, *events: Event) -> None:
        """Something happened; decide on it as soon as this turn of the loop is over."""
        if not self._inbox:
            self._inbox_since = time.perf_counter()
        self._inbox += events
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
        events, since, self._inbox = self._inbox, self._inbox_since, []
        began, now_s = time.perf_counter(), self.now_s()
        try:
            plan = self.scheduler.step(now_s, events)
        except Exception as error:
            self._policy_failed(error)
            return
        self.metrics.decided(self.policy_name, time.perf_counter() - began)
        self.decided_s = now_s
        self._command(plan.commands)
        self._observe_ledger(now_s)
        self._wake_at(plan.wake_s, now_s)
        self._settle()
        if plan.commands:
            self.latencies_s.append(time.perf_counter() - since)
        self._last_cycle_s = asyncio.get_running_loop().time()

    def _command(self, commands: Sequence[Reconfigure]) -> None:
        """Put down what was decided: for those who lose GPUs also who gets some by the same decision, and why."""
        moves = [
            (job, command, job.target_gpus)
            for command in commands
            if (job := self.jobs.get(command.job)) is not None and not job.is_over
        ]
        gains = sorted(((c.share.gpus - before, job) for job, c, before in moves), key=lambda g: -g[0])
        winners = [job for gain, job in gains if gain > 0]
        explained = 0
        for job, command, before in moves:
            gpus = command.share.gpus
            data: dict[str, Any] = {"verb": command.verb, "from_gpus": before, "to_gpus": gpus}
            if gpus < before and winners:
                data |= {"policy": self.policy_name, "by": [w.id for w in winners[:MOST_NAMED]]}
                if explained < MOST_EXPLAINED and job.id in self.scheduler.view:
                    explained += 1
                    reason = self.scheduler.outcome(job.id, self.now_s()).reason
                    data["reason"] = reason and ReasonModel.of(reason).model_dump()
                self.metrics.preempted(winners[0].user, job.user, command.verb)
            self._aim_at(job, command)
            self.outbox.event("job.target", f"{command.verb}: {before} -> {gpus} GPUs", job, **data)
            self.metrics.resized(command.verb)

    def _aim_at(self, job: LiveJob, command: Reconfigure) -> None:
        gpus = command.share.gpus
        # Without nodes to tell apart there is no placement: the first node is all there is.
        job.target = dict(command.placement) or ({0: gpus} if gpus else {})
        job.gpu_type = command.share.gpu_type if gpus else job.gpu_type
        job.plan, job.refused = command.plan, 0
        self.outbox.job(job)
        self._changed.add(job.id)

    def _policy_failed(self, error: Exception) -> None:
        """A policy that raises must not take the cluster down: a simple one goes on."""
        log.exception("policy %s failed", self.policy_name)
        text = f"policy {self.policy_name} failed ({type(error).__name__}: {error}); fifo decides instead"
        if self.policy_name == "fifo":
            raise error
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
            self.cluster = self.scheduler.cluster
            self.scheduler = self._make_scheduler()
            self._fill_scheduler(restore=False)
            copy.deepcopy(self.scheduler).step(self.now_s(), [Timer()])
        except Exception as error:
            self.policy_name, self.policy_options, self.scheduler = before
            if isinstance(error, ShoalError):
                raise
            log.exception("policy %s failed at its first decision", name)
            what = f"{type(error).__name__}: {error}".rstrip(": ")
            raise ShoalError(f"policy {name} fails ({what}), so {before[0]} stays in force") from error
        # The new scheduler was told of all jobs as they are, so news of them that waits is old.
        gone = [
            e for e in self._inbox if isinstance(e, (Finished, Cancelled)) and e.job_id in self.scheduler.jobs
        ]
        self._inbox = [*gone, *(e for e in self._inbox if isinstance(e, TicketsChanged))]
        self.post(Timer())

    def _wake_at(self, wake_s: float, now_s: float) -> None:
        if self._wake is not None:
            self._wake.cancel()
            self._wake = None
        if np.isfinite(wake_s):
            delay_s = max(wake_s - now_s, COALESCE_S)
            self._wake = asyncio.get_running_loop().call_later(delay_s, self.post, Timer())

    def lose_node(self, node: int) -> None:
        """Its GPUs are out of use. Jobs there keep what they have elsewhere if that is enough for them."""
        self.drained.add(node)
        scheduler = self.scheduler
        for job_id, placement in list(scheduler.placements.items()):
            job = self.jobs.get(job_id)
            if job is None or all(at != node for at, _ in placement):
                continue
            rest = {at: gpus for at, gpus in placement if at != node}
            before, enough = job.target_gpus, sum(rest.values()) >= job.min_gpus
            job.target = rest if scheduler.policy.elastic and enough else {}
            text = f"{self.nodes[node].name} is out of use: {before} -> {job.target_gpus} GPUs"
            self.outbox.event("job.target", text, job, verb="lose", from_gpus=before, to_gpus=job.target_gpus)
            self.outbox.job(job)
            self.soon(job)
        self.post(NodeLost(node))

    def node_back(self, node: int) -> None:
        self.drained.discard(node)
        self.post(NodeBack(node))

    # -- carrying out ------------------------------------------------------------------------------

    def soon(self, job: LiveJob) -> None:
        """See to this job when the present turn of the loop is over."""
        self._changed.add(job.id)
        self._settle_soon()

    def _settle_soon(self) -> None:
        if self._settle_at is None:
            self._settle_at = asyncio.get_running_loop().call_soon(self._settle)

    def gpus_freed(self) -> None:
        """Someone may wait for them."""
        for job_id in self.unmet:
            if job_id in self.jobs:
                self.soon(self.jobs[job_id])

    def _settle(self) -> None:
        """Lead every job that changed towards its target, those that give before those that take."""
        if self._settle_at is not None:
            self._settle_at.cancel()
            self._settle_at = None
        if not self.ready:
            return
        changed, self._changed = self._changed, set()
        jobs = [self.jobs[i] for i in sorted(changed) if i in self.jobs and not self.jobs[i].is_over]
        if not self.stopping:
            for job in sorted(jobs, key=lambda j: j.target_gpus >= j.gpus):
                self.crews[job.resize].reconcile(job)
        self._flush()

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
            self._settle_soon()
            return
        if worker.device[0] >= 0:
            self.devices.take_back(worker.device, worker.id)
        crew = self.crews[job.resize]
        with self.as_of(now_s - (exit_.ago_s or 0.0)):
            crew.holds(job)
            how = exit_.signal or ("" if exit_.code is None else f"exit code {exit_.code}") or exit_.why
            self.outbox.event(
                "worker.ended", f"worker {exit_.worker} ended: {how}", job,
                worker=exit_.worker, exit_code=exit_.code, signal=exit_.signal,
            )  # fmt: skip
            crew.exited(job, worker, exit_)
        self.gpus_freed()
        self._settle_soon()  # with whatever else ends in this turn

    @contextlib.contextmanager
    def as_of(self, then_s: float) -> Iterator[None]:
        """What is taken in here happened then, maybe while no server was there to see it."""
        self._then_s = then_s
        try:
            yield
        finally:
            self._then_s = None

    def then_s(self, job: LiveJob) -> float:
        """When that happened which is being taken in: now, unless `as_of` says otherwise."""
        now_s = self.now_s()
        return now_s if self._then_s is None else min(max(self._then_s, job.life.settled_s), now_s)

    def job_over(self, job: LiveJob) -> None:
        """It has ended and its last process is gone."""
        self.metrics.job_over(job)
        self.profiles.keep(job)
        del self.jobs[job.id]
        self.unmet.discard(job.id)
        if job.id in self.scheduler.jobs:
            self.post(Finished(job.id))

    def withdraw(self, job: LiveJob) -> None:
        """The scheduler is no longer to reckon with this job."""
        if job.id in self.scheduler.jobs:
            self.post(Cancelled(job.id))

    # -- time and memory ---------------------------------------------------------------------------

    def _observe_ledger(self, now_s: float) -> None:
        scheduler = self.scheduler
        users = scheduler.cluster.users
        for user in users[len(self.ledger.users) :]:
            self.ledger.join(user.name)
        tickets = np.array([u.tickets for u in users], np.float64)
        traded, entitled = (
            getattr(scheduler.policy, "traded", None),
            getattr(scheduler.policy, "entitled", None),
        )
        if len(users):
            self.ledger.observe(
                scheduler.view,
                tickets,
                scheduler.supply.gpus_of_type,
                now_s,
                want_gpus=scheduler.policy.wish_gpus(scheduler.view),
                traded=traded() if callable(traded) else None,
                entitled=entitled() if callable(entitled) else None,
            )

    async def _save_regularly(self) -> None:
        """What is nice to have after a crash, and no harm if it is a few seconds old."""
        while True:
            await asyncio.sleep(SAVE_S)
            self.save()

    def save(self) -> None:
        view = self.scheduler.view
        rows = {
            str(int(job_id)): [float(view.memory_a[i]), float(view.memory_b[i]), float(view.memory_c[i])]
            for i, job_id in enumerate(view.job_ids)
        }
        self.ledger.settle(self.now_s())
        try:
            state = self.scheduler.policy.state()
            with self.store.change(self.now_s()) as change:
                change.put("scheduler", {"policy": self.policy_name, "state": plain(state), "rows": rows})
                change.put("plans", self.scheduler.plans)
                change.put(
                    "ledger",
                    {
                        "gpu_types": list(self.cluster.gpu_types),
                        "since_s": self.ledger_since_s,
                        "state": self.ledger.state(),
                    },
                )
                for job in self.jobs.values():
                    if job.resize is Resize.LIVE:
                        change.update_job(job.id, progress=job.row()["progress"], stalled_s=job.stalled_s)
        except ShoalError as error:
            log.error("cannot save: %s", error)

    def worker_directory(self, job_id: int, worker_id: str) -> Path:
        return self.home.job(job_id) / "workers" / worker_id

    async def close(self, *, stop_jobs: bool) -> None:
        """End. Jobs run on without the server, or are ended and begin again when it is back."""
        if stop_jobs:
            await self._stop_jobs()
        self.stopping = True
        for handle in (self._cycle_at, self._settle_at, self._wake, self._retry):
            if handle is not None:
                handle.cancel()
        if self._saver is not None:
            self._saver.cancel()
        for crew in dict.fromkeys(self.crews.values()):
            await crew.close()
        self.save()
        self.outbox.flush()

    async def _stop_jobs(self) -> None:
        """Give every GPU back: live jobs save their state, others are ended."""
        self.stopping = True  # nothing is decided any more
        for job in list(self.jobs.values()):
            job.target = {}
            self.crews[job.resize].shut_down(job)
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


def plain(value: Any) -> Any:
    """Numbers of numpy as those of Python, so that JSON takes them."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    return value


Post = Callable[[Sequence[Event]], None]
