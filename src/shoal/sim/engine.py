"""A simulated cluster that carries out the scheduler's commands in virtual time.

It receives the same commands as a real executor and returns the same events. It is event-driven: the progress
of a job is updated only when its share changes, and its end is one entry in a heap.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Mapping, Sequence
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

import numpy as np

from shoal.core.cluster import Cluster
from shoal.core.events import Cancelled, Event, Finished, Measured, Submitted, Timer
from shoal.core.job import Job, Kind
from shoal.core.ledger import Ledger
from shoal.core.plan import PAUSE, START, Placement, Plan, Reconfigure
from shoal.core.profile import Profile
from shoal.placement.placer import Placer
from shoal.placement.speed_at import speed_at
from shoal.policies.base import Policy
from shoal.scheduler.scheduler import Scheduler
from shoal.sim.costs import Costs
from shoal.sim.fragmentation_meter import FragmentationMeter
from shoal.sim.interrupts import Interrupt, is_interrupt
from shoal.sim.job_ends import JobEnds
from shoal.sim.known_profiles import Knowledge, KnownProfiles, exploration_for, known_profiles_for
from shoal.sim.run_record import RunRecord

if TYPE_CHECKING:
    from shoal.sim.autoscaling import SizeSearches

FINISH, _SWITCH, _MEASURE, _SEARCH, _TIME_LIMIT = 0, 1, 2, 3, 4
_INF = math.inf

#: A share and its placement: (GPUs, type, placement, servers).
Allocation = tuple[int, str, Placement, int]

#: Called regularly with (simulated time, finished jobs, all jobs); returns False to stop.
Progress = Callable[[float, int, int], bool]


class Simulation:
    """One run of one policy over one trace."""

    def __init__(
        self,
        jobs: Sequence[Job],
        profiles: Mapping[str, Profile],
        cluster: Cluster,
        policy: Policy,
        *,
        placer: Placer | None = None,
        costs: Costs | None = None,
        knowledge: Knowledge | None = None,
        whole_seconds: bool = False,
        timeline: bool = True,
        servers_apart: bool = False,
        seed: int = 0,
    ) -> None:
        self.jobs = tuple(jobs)
        self.profiles = [profiles[job.model] for job in self.jobs]
        self.cluster = cluster
        self.known = known_profiles_for(
            knowledge or Knowledge(), self.jobs, self.profiles, cluster, np.random.default_rng(seed)
        )
        self.costs = costs or Costs()
        self.scheduler = Scheduler(
            cluster, policy, placer, exploration=exploration_for(knowledge or Knowledge(), self.costs)
        )
        self._searches = self._searches_for(policy, seed)
        self.whole_seconds = whole_seconds
        self.timeline = timeline
        users = cluster.users
        # Fair sharing needs at least two users.
        start_s = self.jobs[0].submit_s if self.jobs else 0.0
        names = tuple(u.name for u in users)
        self.ledger = Ledger(names, cluster.gpu_types, start_s=start_s) if len(users) > 1 else None
        self._tickets = np.array([u.tickets for u in users])
        self.record = RunRecord.empty(policy.name, self.jobs, cluster.total_gpus)
        n = len(self.jobs)
        # The true state of each job: remaining iterations at `since`, the rate from then on, and the share
        # that trains (which lags behind the scheduler's while new workers prepare).
        self._left = [job.iterations or 0.0 for job in self.jobs]
        self._rate = [0.0] * n
        self._since = [0.0] * n
        self._gpus = [0] * n
        self._allocation: list[Allocation] = [(0, "", (), 0)] * n
        self._version = [0] * n
        self._waiting_from = [job.submit_s for job in self.jobs]
        #: The pending share of a job while its new workers prepare, and when they are ready.
        self._target: dict[int, tuple[Allocation, float]] = {}
        self._heap: list[tuple[float, int, int, int, int]] = []
        self._pushed = 0
        self._used = 0  # GPUs in use
        self._granted = [0] * n
        self._changes = self.record.changes.data
        self._running = 0  # jobs with GPUs
        self._speed_tables: dict[tuple[int, str], list[float]] = {}
        #: Whether parameter servers run on a node of their own instead of beside their workers.
        self.servers_apart = servers_apart
        self._meter = None if cluster.pooled else FragmentationMeter(cluster)
        #: Which jobs are refused, can never run or reach their time limit.
        self._ends = JobEnds(self.jobs, self.scheduler)

    def _searches_for(self, policy: Policy, seed: int) -> SizeSearches | None:
        """The autoscaler, if jobs request it and the policy resizes jobs."""
        if not policy.elastic or not any(job.autoscale for job in self.jobs):
            return None
        from shoal.sim.autoscaling import SizeSearches

        rng = np.random.default_rng([seed, 1])
        return SizeSearches(self.jobs, self.cluster, rng, transition_s=self.costs.move_s)

    # -- the loop ----------------------------------------------------------------------------------

    def run(
        self, progress: Progress | None = None, every: int = 100, interrupt: Interrupt | None = None
    ) -> RunRecord:
        """Run to the end of the trace, or until `progress` returns False.

        With an `interrupt`, Ctrl-C ends the run early: the record then holds the results so far, and its
        `interrupted` is set.
        """
        record = self.record
        collects = gc.isenabled()
        gc.disable()  # a run makes no reference cycles, and collecting among 100,000 jobs takes 10 % of the time
        try:
            self._run(progress, every, interrupt or Interrupt())
        except (KeyboardInterrupt, SystemError) as error:
            if interrupt is None or not is_interrupt(error):
                raise
            record.interrupted = True
        finally:
            if collects:
                gc.enable()
        if self.ledger:
            self.ledger.settle(record.end_s)
            record.extra["ledger"] = self.ledger.totals()
            record.ledger_over_time = self.ledger.over_time()
        if record.interrupted:
            view = self.scheduler.view
            record.gpu_s[view.job_ids] = view.attained_now(record.end_s)
        if self._meter:
            self._meter.settle(record.end_s)
            record.extra.update(self._meter.figures())
        if self.scheduler.exploration is not None:
            record.extra["exploration"] = self.scheduler.exploration.figures()
        if self._searches:
            record.extra["autoscaler"] = self._searches.figures()
        record.extra.update(self.scheduler.policy.report())
        record.extra.update(self._ends.figures(record.finish_s))
        record.decisions = self.scheduler.plans
        record.events = self.scheduler.events_seen
        return record

    def _run(self, progress: Progress | None, every: int, interrupt: Interrupt) -> None:
        jobs, heap, record, scheduler = self.jobs, self._heap, self.record, self.scheduler
        submit_s = [self._tick(job.submit_s) for job in jobs]
        apply = self._apply_directly if self._is_simple() else self._apply_commands
        total, arrived, done = len(jobs), 0, 0
        now, wake_s = 0.0, _INF
        while done < total:
            next_arrival = submit_s[arrived] if arrived < total else _INF
            next_end = heap[0][0] if heap else _INF
            now = min(next_arrival, next_end, wake_s)
            if now == _INF:
                break  # the other jobs can never run; their finish time stays nan
            events: list[Event] = []
            if next_end <= now:
                done += self._process_due(now, events)
            while arrived < total and submit_s[arrived] <= now:
                job = self._ends.submitted(arrived)
                if job is None:
                    done += 1
                else:
                    events.append(Submitted(arrived, job, self.known.profile(arrived)))
                    if self._searches:
                        events += self._searches.begin(arrived)
                arrived += 1
            if not events:
                if wake_s > now:
                    continue
                events.append(Timer())
            plan = scheduler.step(now, events)
            apply(plan, now)
            self._ends.decided()
            withdrawn = self._withdraw(now) if self._ends.never else 0
            done += withdrawn
            wake_s = self._tick(min(plan.wake_s, self._after_plan(now)))
            if withdrawn:
                wake_s = now  # jobs may have waited for those
            if len(heap) > 4 * self._running + 256:
                self._drop_stale_entries()
            if self.ledger:
                self._account(now)
            if self.timeline:
                record.times_s.append(now)
                record.used.append(self._used)
                record.active.append(arrived - done)
                record.waiting.append(arrived - done - self._running)
            record.end_s = now
            waits = self._ends.limited and scheduler.admission.wake_s(scheduler, now) < _INF
            if not (self._running or heap or len(plan.changes) or arrived < total or waits or withdrawn):
                break  # no job runs or will arrive: further timers of the policy would change nothing
            stop = interrupt.asked
            if not stop and progress is not None and scheduler.plans % every == 0:
                stop = not progress(now, done, total)
            if stop:
                record.interrupted = True
                break

    def _process_due(self, now: float, events: list[Event]) -> int:
        """Process the heap entries up to `now`, add their events, and return the number of finished jobs."""
        heap, finished = self._heap, 0
        while heap and heap[0][0] <= now:
            _, _, kind, j, version = heappop(heap)
            if version != self._version[j]:
                continue  # a newer command has replaced this entry
            if kind == FINISH:
                self._finish(j, now)
                self._ends.ended(j, succeeded=True)
                events.append(Finished(j))
                finished += 1
            elif kind == _TIME_LIMIT:
                self._finish(j, now)
                self._ends.timed_out(j)
                events.append(Finished(j, succeeded=False))
                finished += 1
            elif kind == _SWITCH:
                self._switch(j, now)
            elif kind == _MEASURE:
                events += self._measure(j)
            else:
                events += self._search(j, now)
        return finished

    def _withdraw(self, now: float) -> int:
        """Withdraw the jobs that can never run, and return their number."""
        gone = 0
        while jobs := sorted(self._ends.never):
            for j in jobs:
                self._ends.withdrawn(j)
                self.scheduler.take_in(Cancelled(j), now)
                gone += 1
        return gone

    def _after_plan(self, now: float) -> float:
        """Hook for subclasses, called after each plan. Returns when it wants to be called again."""
        return _INF

    def _tick(self, at_s: float) -> float:
        """The event time, rounded up to whole seconds if requested, as in the AFS authors' simulator."""
        return float(math.ceil(at_s - 1e-9)) if self.whole_seconds and at_s != _INF else at_s

    def _push(self, at_s: float, kind: int, j: int) -> None:
        self._pushed += 1
        at_s = self._tick(at_s) if self.whole_seconds else at_s
        heappush(self._heap, (at_s, self._pushed, kind, j, self._version[j]))

    def _drop_stale_entries(self) -> None:
        """Drop entries that newer commands have replaced, so that the size of the heap follows the cluster's."""
        self._heap[:] = [entry for entry in self._heap if entry[4] == self._version[entry[3]]]
        heapify(self._heap)

    def _account(self, now: float) -> None:
        scheduler, policy = self.scheduler, self.scheduler.policy
        assert self.ledger is not None
        self.ledger.observe(
            scheduler.view,
            self._ends.tickets(self._tickets),
            scheduler.supply.gpus_of_type,
            now,
            want_gpus=policy.wish_gpus(scheduler.view),
            traded=policy.traded(),
            entitled=policy.entitled(),
        )

    # -- commands ----------------------------------------------------------------------------------

    def _apply_commands(self, plan: Plan, now: float) -> None:
        for command in plan.commands:
            self._apply(command, now)

    def _apply(self, command: Reconfigure, now: float) -> None:
        j, share, verb = command.job, command.share, command.verb
        self._count(j, share.gpus)
        if self._meter:
            self._meter.settle(now)
            self._meter.observe(command)
        record = self.record
        self._ends.holds(j, share.gpus, now)
        self._settle(j, now)
        self._version[j] += 1
        pending = self._target.pop(j, None) if self._target else None
        if self.timeline:
            record.change_s.append(now)
            record.change_job.append(j)
            record.change_gpus.append(share.gpus)
        self._changes[j] += 1
        if verb == "pause":
            self._gpus[j], self._rate[j] = 0, 0.0
            self._waiting_from[j] = now
            self._observe(j, 0.0, now)
            return
        if verb == "start":
            record.first_start_s[j] = now
        if verb in ("start", "resume"):
            record.wait_s[j] += now - self._waiting_from[j]
        allocation = (share.gpus, share.gpu_type, command.placement, share.servers)
        self._change_share(j, allocation, verb, pending, now)
        self._push_time_limit(j, now)

    def _push_time_limit(self, j: int, now: float) -> None:
        at_s = self._ends.limit_at(j, now)
        if at_s is not None:
            self._push(at_s, _TIME_LIMIT, j)

    def _is_simple(self) -> bool:
        """Whether shares change without delay or cost, and the scheduler knows the true speeds: most large runs."""
        added = self._meter or self._searches or type(self.known) is not KnownProfiles
        if type(self) is not Simulation or added or self.costs.kind != "none" or not self.cluster.pooled:
            return False
        if any(job.time_limit_s is not None for job in self.jobs):
            return False
        return all(job.kind is Kind.ALL_REDUCE and job.iterations for job in self.jobs)

    def _apply_directly(self, plan: Plan, now: float) -> None:
        """A fast equivalent of `_apply_commands` for simple runs, in which the scheduler's view is the true state."""
        if not len(plan.changes):
            return
        record, given, versions, counts = self.record, self._granted, self._version, self._changes
        used, running, pushed = self._used, self._running, self._pushed
        ends_s = self.scheduler.go_on(plan)
        if self.whole_seconds:
            ends_s = np.ceil(ends_s - 1e-9)
        for (_, j, gpus, _, _, version, verb), end_s in zip(plan.changes.tolist(), ends_s.tolist()):
            used += gpus - given[j]
            given[j] = gpus
            versions[j] = version
            counts[j] += 1
            if self.timeline:
                record.change_s.append(now)
                record.change_job.append(j)
                record.change_gpus.append(gpus)
            if gpus:
                pushed += 1
                heappush(self._heap, (end_s, pushed, FINISH, j, version))
            if verb == PAUSE:
                self._waiting_from[j] = now
                running -= 1
            elif verb >= START:
                record.wait_s[j] += now - self._waiting_from[j]
                running += 1
                if verb == START:
                    record.first_start_s[j] = now
        self._used, self._running, self._pushed = used, running, pushed

    def _count(self, j: int, gpus: int) -> None:
        self._used += gpus - self._granted[j]
        self._running += (gpus > 0) - (self._granted[j] > 0)
        self._granted[j] = gpus

    def _change_share(
        self, j: int, allocation: Allocation, verb: str, pending: tuple[Allocation, float] | None, now: float
    ) -> None:
        """Change from the share that trains to the new one, with the delays of the cost model."""
        costs, had = self.costs, self._gpus[j]
        if verb == "start" or costs.kind == "none" or (had and allocation == self._allocation[j]):
            self._train(j, allocation, now)
        elif costs.kind == "restart":
            self._pause_then_train(j, allocation, costs.restart_of(self.jobs[j].model), now)
        elif costs.kind == "suspend":
            same = allocation == self._allocation[j]
            self._pause_then_train(j, allocation, costs.resume_s if same else costs.migrate_s, now)
        elif had == 0:  # no worker trains in the meantime
            self._pause_then_train(j, allocation, costs.prepare_s + costs.pause_s, now)
        elif allocation[0] < had and allocation[1] == self._allocation[j][1]:  # a shrink needs no new worker
            self._pause_then_train(j, allocation, costs.pause_s, now)
        else:
            self._prepare(j, allocation, pending, now)

    def _pause_then_train(self, j: int, allocation: Allocation, seconds: float, now: float) -> None:
        self.record.paused_s[j] += seconds
        self._train(j, allocation, now + seconds)

    def _prepare(
        self, j: int, allocation: Allocation, pending: tuple[Allocation, float] | None, now: float
    ) -> None:
        """New workers prepare while the old ones train. Workers that already prepare and are still needed go on."""
        ready = now + self.costs.prepare_s
        if pending and pending[0][1] == allocation[1] and allocation[0] <= pending[0][0]:
            ready = max(pending[1], now)
        self._target[j] = (allocation, ready)
        end = self._since[j] + self._left[j] / self._rate[j] if self._rate[j] > 0 else _INF
        self._push(min(end, ready), FINISH if end <= ready else _SWITCH, j)
        self._observe(j, self._rate[j], self._since[j])

    def _switch(self, j: int, now: float) -> None:
        """The new workers are ready: the job continues at its new share after a short pause."""
        self._settle(j, now)
        allocation, _ = self._target.pop(j)
        self._version[j] += 1
        self.record.paused_s[j] += self.costs.pause_s
        self._train(j, allocation, now + self.costs.pause_s)
        self._push_time_limit(j, now)

    def _train(self, j: int, allocation: Allocation, at_s: float) -> None:
        """The job trains with this share from `at_s`."""
        rate = self._speed(j, allocation)
        self._gpus[j], self._allocation[j], self._rate[j], self._since[j] = (
            allocation[0],
            allocation,
            rate,
            at_s,
        )
        self._observe(j, rate, at_s)
        self._push(at_s + self._left[j] / rate if rate > 0 else _INF, FINISH, j)
        if self.known.measure_after_s is not None:
            self._push(at_s + self.known.measure_after_s, _MEASURE, j)
        if self._searches:
            self._search_after(j, at_s)

    def _observe(self, j: int, rate: float, at_s: float) -> None:
        self.scheduler.observe(j, self.known.remaining(j, self._left[j]), rate, at_s)

    def _measure(self, j: int) -> list[Event]:
        """Measure the step time of a job, and update the scheduler's profile."""
        gpus, gpu_type, placement, servers = self._allocation[j]
        if self._rate[j] <= 0:
            return []
        if not self.known.measure(j, gpus, len(placement), gpu_type, self._rate[j], servers):
            return []
        model, scheduler = self.jobs[j].model, self.scheduler
        others = [i for i in scheduler.jobs if self.jobs[i].model == model and i != j]
        return [Measured(i, self.known.profile(i)) for i in (j, *others)]

    def _search_after(self, j: int, at_s: float) -> None:
        assert self._searches
        wait_s = self._searches.next_s(j, self._gpus[j], self._rate[j])
        if wait_s is not None:
            self._push(at_s + wait_s, _SEARCH, j)

    def _search(self, j: int, now: float) -> Sequence[Event]:
        """A job has trained some steps at its share: the autoscaler may choose another one."""
        assert self._searches
        self._settle(j, now)
        elapsed_s = now - float(self.record.first_start_s[j])
        events = self._searches.decide(j, self._gpus[j], self._rate[j], elapsed_s, self._left[j])
        self._search_after(j, now)
        return events

    def _settle(self, j: int, now: float) -> None:
        since = self._since[j]
        if now > since:
            left = self._left[j] - self._rate[j] * (now - since)
            self._left[j] = left if left > 0.0 else 0.0
            self._since[j] = now

    def _speed(self, j: int, allocation: Allocation) -> float:
        gpus, gpu_type, placement, servers = allocation
        if len(placement) > 1 or servers:
            return speed_at(self.profiles[j], gpu_type, gpus, placement, servers, apart=self.servers_apart)
        return self._curve(j, gpu_type)[gpus]

    def _curve(self, j: int, gpu_type: str) -> list[float]:
        """Speed by number of GPUs of a job on one node or in a pool."""
        profile = self.profiles[j]
        speeds = self._speed_tables.get((id(profile), gpu_type))
        if speeds is None:
            speeds = self._speed_tables[id(profile), gpu_type] = profile.speeds_on(gpu_type).tolist()
        return speeds

    def _finish(self, j: int, now: float) -> None:
        record, view = self.record, self.scheduler.view.cells
        row = self.scheduler.view.row(j)
        record.finish_s[j] = now
        record.gpu_s[j] = view.attained_gpu_s[row] + view.gpus[row] * (now - view.changed_s[row])
        self._version[j] += 1
        self._count(j, 0)
        if self._meter:
            self._meter.settle(now)
            self._meter.forget(j)
        if self.timeline:
            record.change_s.append(now)
            record.change_job.append(j)
            record.change_gpus.append(0)
