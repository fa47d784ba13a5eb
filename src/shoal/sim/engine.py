"""A virtual cluster in virtual time that obeys the scheduler's commands.

It gets the same commands as a real executor and answers with the same events. Between events nothing is
computed: a job's progress is settled only when its share changes, and its end is one entry in a heap.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Mapping, Sequence
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

import numpy as np

from shoal.core.cluster import Cluster
from shoal.core.events import Event, Finished, Measured, Submitted, Timer
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
from shoal.sim.known_profiles import Knowledge, KnownProfiles, known_profiles_for
from shoal.sim.run_record import RunRecord

if TYPE_CHECKING:
    from shoal.sim.autoscaling import SizeSearches

FINISH, _SWITCH, _MEASURE, _SEARCH = 0, 1, 2, 3
_INF = math.inf

#: A share and where it is: (GPUs, type, placement, servers).
Allocation = tuple[int, str, Placement, int]

#: Called now and then with (simulated time, jobs done, jobs in all); returns False to stop.
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
        self.scheduler = Scheduler(cluster, policy, placer)
        self.costs = costs or Costs()
        self._searches = self._searches_for(policy, seed)
        self.whole_seconds = whole_seconds
        self.timeline = timeline
        users = cluster.users
        #: Who was due what and got what; there is nothing to share out fairly with one user.
        start_s = self.jobs[0].submit_s if self.jobs else 0.0
        names = tuple(u.name for u in users)
        self.ledger = Ledger(names, cluster.gpu_types, start_s=start_s) if len(users) > 1 else None
        self._tickets = np.array([u.tickets for u in users])
        self.record = RunRecord.empty(policy.name, self.jobs, cluster.total_gpus)
        n = len(self.jobs)
        # The truth about each job: iterations left at `since`, the rate from then on, and the share that
        # trains (which lags behind the scheduler's while newcomers prepare).
        self._left = [job.iterations or 0.0 for job in self.jobs]
        self._rate = [0.0] * n
        self._since = [0.0] * n
        self._gpus = [0] * n
        self._spot: list[Allocation] = [(0, "", (), 0)] * n
        self._version = [0] * n
        self._waiting_from = [job.submit_s for job in self.jobs]
        #: Where a job is being led while newcomers prepare, and when they are ready.
        self._target: dict[int, tuple[Allocation, float]] = {}
        self._heap: list[tuple[float, int, int, int, int]] = []
        self._pushed = 0
        self._used = 0  # GPUs given out
        self._given = [0] * n
        self._changes = self.record.changes.data
        self._running = 0  # jobs that have any
        self._speed_tables: dict[tuple[int, str], list[float]] = {}
        #: Whether parameter servers are on a node of their own, not beside their workers.
        self.servers_apart = servers_apart
        self._meter = None if cluster.pooled else FragmentationMeter(cluster)

    def _searches_for(self, policy: Policy, seed: int) -> SizeSearches | None:
        """The autoscaler, where jobs ask for it and the policy resizes them."""
        if not policy.elastic or not any(job.autoscale for job in self.jobs):
            return None
        from shoal.sim.autoscaling import SizeSearches

        rng = np.random.default_rng([seed, 1])
        return SizeSearches(self.jobs, self.cluster, rng, transition_s=self.costs.move_s)

    # -- the loop ----------------------------------------------------------------------------------

    def run(
        self, progress: Progress | None = None, every: int = 100, interrupt: Interrupt | None = None
    ) -> RunRecord:
        """Run to the end of the trace, or until `progress` says to stop.

        Who looks at `interrupted` afterwards may hand in an `interrupt`: the record is of what is known by then.
        """
        record = self.record
        collects = gc.isenabled()
        gc.disable()  # a run makes no cycles, and looking for them among 100,000 jobs takes a tenth of its time
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
        if self._searches:
            record.extra["autoscaler"] = self._searches.figures()
        record.extra.update(self.scheduler.policy.report())
        record.decisions = self.scheduler.plans
        record.events = self.scheduler.events_seen
        return record

    def _run(self, progress: Progress | None, every: int, interrupt: Interrupt) -> None:
        jobs, heap, record, scheduler = self.jobs, self._heap, self.record, self.scheduler
        submit_s = [self._tick(job.submit_s) for job in jobs]
        obey = self._obey_at_once if self._is_plain() else self._obey_all
        total, arrived, done = len(jobs), 0, 0
        now, wake_s = 0.0, _INF
        while done < total:
            next_arrival = submit_s[arrived] if arrived < total else _INF
            next_end = heap[0][0] if heap else _INF
            now = min(next_arrival, next_end, wake_s)
            if now == _INF:
                break  # what is left can never run; the caller sees it by its missing finish time
            events: list[Event] = []
            while heap and heap[0][0] <= now:
                _, _, kind, j, version = heappop(heap)
                if version != self._version[j]:
                    continue  # a newer command has overtaken this one
                if kind == FINISH:
                    self._finish(j, now)
                    events.append(Finished(j))
                    done += 1
                elif kind == _SWITCH:
                    self._switch(j, now)
                elif kind == _MEASURE:
                    events += self._measure(j)
                else:
                    events += self._search(j, now)
            while arrived < total and submit_s[arrived] <= now:
                events.append(Submitted(arrived, jobs[arrived], self.known.profile(arrived)))
                if self._searches:
                    events += self._searches.begin(arrived)
                arrived += 1
            if not events:
                if wake_s > now:
                    continue
                events.append(Timer())
            plan = scheduler.step(now, events)
            obey(plan, now)
            wake_s = self._tick(min(plan.wake_s, self._after(now)))
            if len(heap) > 4 * self._running + 256:
                self._forget_overtaken()
            if self.ledger:
                self._account(now)
            if self.timeline:
                record.times_s.append(now)
                record.used.append(self._used)
                record.active.append(arrived - done)
                record.waiting.append(arrived - done - self._running)
            record.end_s = now
            if not (self._running or heap or len(plan.changes) or arrived < total):
                break  # nothing runs, comes or was started: a policy that wakes up finds it so for ever
            stop = interrupt.asked
            if not stop and progress is not None and scheduler.plans % every == 0:
                stop = not progress(now, done, total)
            if stop:
                record.interrupted = True
                break

    def _after(self, now: float) -> float:
        """What else happens after a plan, for those who add to this; returns when to ask again."""
        return _INF

    def _tick(self, at_s: float) -> float:
        """Event times as they are, or rounded up to whole seconds as the AFS authors' simulator does."""
        return float(math.ceil(at_s - 1e-9)) if self.whole_seconds and at_s != _INF else at_s

    def _push(self, at_s: float, kind: int, j: int) -> None:
        self._pushed += 1
        at_s = self._tick(at_s) if self.whole_seconds else at_s
        heappush(self._heap, (at_s, self._pushed, kind, j, self._version[j]))

    def _forget_overtaken(self) -> None:
        """Drop entries that newer commands have overtaken, so that the heap stays as small as the cluster."""
        self._heap[:] = [entry for entry in self._heap if entry[4] == self._version[entry[3]]]
        heapify(self._heap)

    def _account(self, now: float) -> None:
        scheduler, policy = self.scheduler, self.scheduler.policy
        assert self.ledger is not None
        self.ledger.observe(
            scheduler.view,
            self._tickets,
            scheduler.supply.gpus_of_type,
            now,
            want_gpus=policy.wish_gpus(scheduler.view),
            traded=policy.traded(),
            entitled=policy.entitled(),
        )

    # -- commands ----------------------------------------------------------------------------------

    def _obey_all(self, plan: Plan, now: float) -> None:
        for command in plan.commands:
            self._obey(command, now)

    def _obey(self, command: Reconfigure, now: float) -> None:
        j, share, verb = command.job, command.share, command.verb
        self._count(j, share.gpus)
        if self._meter:
            self._meter.settle(now)
            self._meter.observe(command)
        record = self.record
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
        spot = (share.gpus, share.gpu_type, command.placement, share.servers)
        self._reach(j, spot, verb, pending, now)

    def _is_plain(self) -> bool:
        """Whether shares change at once, as the scheduler knows they do, and nobody adds to that: most large runs."""
        added = self._meter or self._searches or type(self.known) is not KnownProfiles
        if type(self) is not Simulation or added or self.costs.kind != "none" or not self.cluster.pooled:
            return False
        return all(job.kind is Kind.ALL_REDUCE and job.iterations for job in self.jobs)

    def _obey_at_once(self, plan: Plan, now: float) -> None:
        """What `_obey_all` comes to in a plain run: what the scheduler knows of the jobs is all there is to know."""
        if not len(plan.changes):
            return
        record, given, versions, counts = self.record, self._given, self._version, self._changes
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
        self._used += gpus - self._given[j]
        self._running += (gpus > 0) - (self._given[j] > 0)
        self._given[j] = gpus

    def _reach(
        self, j: int, spot: Allocation, verb: str, pending: tuple[Allocation, float] | None, now: float
    ) -> None:
        """Lead the job from the share that trains to its new one, as the cost model says."""
        costs, had = self.costs, self._gpus[j]
        if verb == "start" or costs.kind == "none" or (had and spot == self._spot[j]):
            self._train(j, spot, now)
        elif costs.kind == "restart":
            self._stand_still(j, spot, costs.restart_of(self.jobs[j].model), now)
        elif costs.kind == "suspend":
            self._stand_still(j, spot, costs.resume_s if spot == self._spot[j] else costs.migrate_s, now)
        elif had == 0:  # nobody trains meanwhile
            self._stand_still(j, spot, costs.prepare_s + costs.pause_s, now)
        elif spot[0] < had and spot[1] == self._spot[j][1]:  # a shrink needs no newcomer
            self._stand_still(j, spot, costs.pause_s, now)
        else:
            self._prepare(j, spot, pending, now)

    def _stand_still(self, j: int, spot: Allocation, seconds: float, now: float) -> None:
        self.record.paused_s[j] += seconds
        self._train(j, spot, now + seconds)

    def _prepare(
        self, j: int, spot: Allocation, pending: tuple[Allocation, float] | None, now: float
    ) -> None:
        """Newcomers prepare while the old workers train on; those still wanted go on preparing."""
        ready = now + self.costs.prepare_s
        if pending and pending[0][1] == spot[1] and spot[0] <= pending[0][0]:
            ready = max(pending[1], now)
        self._target[j] = (spot, ready)
        end = self._since[j] + self._left[j] / self._rate[j] if self._rate[j] > 0 else _INF
        self._push(min(end, ready), FINISH if end <= ready else _SWITCH, j)
        self._observe(j, self._rate[j], self._since[j])

    def _switch(self, j: int, now: float) -> None:
        """The newcomers of a job are ready: it goes on at its new share after a short pause."""
        self._settle(j, now)
        spot, _ = self._target.pop(j)
        self._version[j] += 1
        self.record.paused_s[j] += self.costs.pause_s
        self._train(j, spot, now + self.costs.pause_s)

    def _train(self, j: int, spot: Allocation, at_s: float) -> None:
        """From `at_s` on the job trains with this share."""
        rate = self._speed(j, spot)
        self._gpus[j], self._spot[j], self._rate[j], self._since[j] = spot[0], spot, rate, at_s
        self._observe(j, rate, at_s)
        self._push(at_s + self._left[j] / rate if rate > 0 else _INF, FINISH, j)
        if self.known.measure_after_s is not None:
            self._push(at_s + self.known.measure_after_s, _MEASURE, j)
        if self._searches:
            self._search_after(j, at_s)

    def _observe(self, j: int, rate: float, at_s: float) -> None:
        self.scheduler.observe(j, self.known.remaining(j, self._left[j]), rate, at_s)

    def _measure(self, j: int) -> list[Event]:
        """A job has trained a while at its share: its step time is measured, and beliefs follow."""
        gpus, gpu_type, placement, servers = self._spot[j]
        if self._rate[j] <= 0:
            return []
        estimate = self.known.measure(j, gpus, len(placement), gpu_type, self._rate[j], servers)
        return [] if estimate is None else [Measured(j, estimate)]

    def _search_after(self, j: int, at_s: float) -> None:
        assert self._searches
        wait_s = self._searches.next_s(j, self._gpus[j], self._rate[j])
        if wait_s is not None:
            self._push(at_s + wait_s, _SEARCH, j)

    def _search(self, j: int, now: float) -> Sequence[Event]:
        """A job has trained some steps at its share: the autoscaler may want another one."""
        assert self._searches
        self._settle(j, now)
        elapsed_s = now - float(self.record.first_start_s[j])
        told = self._searches.decide(j, self._gpus[j], self._rate[j], elapsed_s, self._left[j])
        self._search_after(j, now)
        return told

    def _settle(self, j: int, now: float) -> None:
        since = self._since[j]
        if now > since:
            left = self._left[j] - self._rate[j] * (now - since)
            self._left[j] = left if left > 0.0 else 0.0
            self._since[j] = now

    def _speed(self, j: int, spot: Allocation) -> float:
        gpus, gpu_type, placement, servers = spot
        if len(placement) > 1 or servers:
            return speed_at(self.profiles[j], gpu_type, gpus, placement, servers, apart=self.servers_apart)
        return self._curve(j, gpu_type)[gpus]

    def _curve(self, j: int, gpu_type: str) -> list[float]:
        """Speed by GPUs of a job that is in one place."""
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
