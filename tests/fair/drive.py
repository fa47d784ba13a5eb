"""A scheduler driven by hand: jobs that never end unless told to, and what each user had of the GPUs."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from shoal.core.cluster import Cluster
from shoal.core.events import Finished, Submitted, TicketsChanged, Timer
from shoal.core.job import GpuRange, Job
from shoal.core.ledger import ENTITLED, RECEIVED, Ledger
from shoal.core.profile import Profile
from shoal.placement.keep_and_pack import KeepAndPack
from shoal.scheduler.scheduler import Scheduler

LINEAR = Profile.of("linear", {g: 1.0 / g for g in (1, 2, 4, 8, 16, 32, 64)})


class Drive:
    def __init__(self, cluster: Cluster, policy) -> None:
        placer = None if cluster.pooled else KeepAndPack(all_or_nothing=not policy.elastic)
        self.scheduler = Scheduler(cluster, policy, placer)
        self.policy = policy
        self.now_s = 0.0
        self.wake_s = np.inf
        self.made = 0
        self.ledger = Ledger(tuple(u.name for u in cluster.users), cluster.gpu_types, sample_s=60.0)
        #: GPU-seconds by job.
        self.had: dict[int, float] = defaultdict(float)
        self.moves = 0
        self.wakes = 0
        #: What executors measure of a job's true rate: (job, rate) -> rate.
        self.measured = lambda job, rate: rate

    @property
    def view(self):
        return self.scheduler.view

    def submit(self, user: str, gpus: int | str, profile: Profile = LINEAR, **more) -> int:
        span = GpuRange.parse(str(gpus))
        job = Job(f"j{self.made}", self.now_s, span, more.pop("requested", span.min), user=user, **more)
        self.made += 1
        self.step(Submitted(self.made - 1, job, profile))
        return self.made - 1

    def finish(self, job_id: int) -> None:
        self.step(Finished(job_id))

    def tickets(self, user: str, tickets: float) -> None:
        self.step(TicketsChanged(user, tickets))

    def step(self, *events) -> None:
        before = dict(self.scheduler.placements)
        plan = self.scheduler.step(self.now_s, events)
        self.wake_s = plan.wake_s
        for job, where in self.scheduler.placements.items():
            if before.get(job, where) != where:
                self.moves += 1
        view, supply = self.view, self.scheduler.supply
        for row, job in enumerate(view.job_ids.tolist()):  # what executors would tell
            at = view.speed_at[max(view.gpu_type[row], 0), row]
            rate = view.speeds[at + view.gpus[row]] if view.gpus[row] else 0.0
            self.scheduler.observe(job, 1e9, self.measured(job, float(rate)), self.now_s)
        while len(self.ledger.users) < len(supply.cluster.users):
            self.ledger.join(supply.cluster.users[len(self.ledger.users)].name)
        self.ledger.observe(
            view,
            np.array([u.tickets for u in supply.cluster.users]),
            supply.gpus_of_type,
            self.now_s,
            want_gpus=self.policy.wish_gpus(view),
        )
        self.check()

    def check(self) -> None:
        """What must hold after every step, whatever happens."""
        view, supply = self.view, self.scheduler.supply
        assert view.gpus.sum() <= supply.total_gpus
        used = np.zeros(len(supply.gpus_of_type), int)
        for gpus, t in zip(view.gpus, view.gpu_type):
            if gpus:
                used[t] += gpus
        assert (used <= supply.gpus_of_type).all()
        on_node = np.zeros(len(supply.gpus_of_node), int)
        for where in self.scheduler.placements.values():
            for node, gpus in where:
                on_node[node] += gpus
        assert (on_node <= supply.gpus_of_node).all()
        assert ((view.gpus == 0) | (view.gpus >= view.min_gpus)).all()
        if self.scheduler.plans % 20 == 0:
            for _ in self.scheduler.outcomes(self.now_s):
                pass  # no job below its wish is without a reason, or this raises

    def run(self, seconds: float) -> None:
        end = self.now_s + seconds
        while True:
            at = min(self.wake_s, end)
            for job, gpus in zip(self.view.job_ids.tolist(), self.view.gpus.tolist()):
                self.had[job] += gpus * (at - self.now_s)
            self.now_s = at
            self.ledger.settle(at)
            if at >= end:
                return
            self.wakes += 1
            self.step(Timer())

    def off_by(self) -> np.ndarray:
        """GPU-seconds each user had beyond what it was entitled to."""
        total = self.ledger.account.sum(axis=1)
        return total[:, RECEIVED] - total[:, ENTITLED]

    def off_by_of_what_was_given(self) -> np.ndarray:
        """The same against the entitled part of what was given out: GPUs no gang fitted on are owed by nobody."""
        total = self.ledger.account.sum(axis=1)
        given = total[:, RECEIVED].sum() / total[:, ENTITLED].sum()
        return total[:, RECEIVED] - total[:, ENTITLED] * given
