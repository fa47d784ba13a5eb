"""The next job prepares where one is about to end: when, beside whom, and that the policy still decides."""

from __future__ import annotations

import numpy as np
import pytest

from shoal.core.cluster import Cluster
from shoal.core.events import Finished, Submitted, Timer
from shoal.core.job import GpuRange, Job
from shoal.core.profile import Profile
from shoal.policies.registry import make_policy
from shoal.scheduler.scheduler import Scheduler
from shoal.scheduler.sharing.prescheduling import Phases, PreScheduling, PreSchedulingPlan

PROFILE = Profile.of("m", {n: 1.0 / n for n in range(1, 5)})
SOME = Phases(pre_s=20.0, post_s=5.0)


class Small:
    """A pool whose jobs do one iteration per second on each GPU."""

    def __init__(self, gpus, policy="fifo"):
        self.scheduler = Scheduler(Cluster.pool(gpus), make_policy(policy))
        self.phases = {}
        self.early = PreScheduling(self.scheduler, self.phases.get)

    def submit(self, now_s, work, gpus=1, phases=SOME):
        job_id = len(self.phases)
        self.phases[job_id] = phases
        job = Job(f"j{job_id}", now_s, GpuRange(gpus, gpus), gpus, iterations=float(work))
        return self.step(now_s, Submitted(job_id, job, PROFILE))

    def step(self, now_s, *events):
        for command in self.scheduler.step(now_s, events or [Timer()]).commands:
            row = self.scheduler.view.row(command.job)
            left = float(self.scheduler.view.remaining_now(now_s)[row])
            self.scheduler.observe(command.job, left, float(command.share.gpus), now_s)
        return self.early.step(now_s)


def test_it_is_launched_once_the_rest_is_shorter_than_its_preparation_and_fifteen_seconds():
    small = Small(1)
    assert small.submit(0.0, 100) == PreSchedulingPlan()
    plan = small.submit(1.0, 50)
    assert plan.launch == ()
    assert plan.wake_s == pytest.approx(100 - 20 - 15, abs=0.01)
    assert small.step(64.9).launch == ()
    assert small.step(plan.wake_s).launch == ((1, 0),)
    assert small.early.beside == {1: 0}


def test_one_prepares_beside_one_and_the_next_waits_for_the_next():
    small = Small(2)
    small.submit(0.0, 30)
    small.submit(0.0, 40)
    assert small.submit(6.0, 50).launch == ((2, 0),)
    assert small.submit(7.0, 50).launch == ((3, 1),)
    assert small.submit(8.0, 50) == PreSchedulingPlan(), "no GPU is left to prepare on, nor to wait for"


def test_who_gets_the_gpu_is_done_and_who_does_not_is_withdrawn():
    small = Small(1)
    small.submit(0.0, 30)
    assert small.submit(10.0, 50).launch == ((1, 0),)
    plan = small.step(30.0, Finished(0))
    assert plan.withdraw == ()
    assert small.early.beside == {}
    other = Small(1, policy="srtf")
    other.submit(0.0, 30)
    assert other.submit(10.0, 50).launch == ((1, 0),)
    other.submit(11.0, 5)  # shorter: it takes the GPU from the first at once
    assert other.early.beside.get(1) != 0
    assert 1 in other.scheduler.view


@pytest.mark.parametrize(
    ("busy", "phases", "wants"),
    [(1, SOME, 1), (2, None, 1), (2, SOME, 2)],
    ids=["a GPU is vacant", "its phases are not known", "it wants two"],
)
def test_who_may_not_is_not_launched(busy, phases, wants):
    small = Small(2)
    for _ in range(busy):
        small.submit(0.0, 20)
    assert small.submit(10.0, 50, gpus=wants, phases=phases) == PreSchedulingPlan()


def test_a_job_whose_end_is_not_known_is_not_waited_for():
    small = Small(1)
    small.submit(0.0, 20, phases=None)
    assert small.submit(10.0, 50) == PreSchedulingPlan()


@pytest.mark.parametrize("policy", ["fifo", "srtf", "max-min"])
def test_the_policy_decides_as_without_it(policy):
    rng = np.random.default_rng(3)
    with_it, without = Small(3, policy), Small(3, policy)
    now = 0.0
    for _ in range(40):
        now += float(rng.uniform(0, 20))
        running = with_it.scheduler.view.job_ids[with_it.scheduler.view.gpus > 0]
        if len(running) and rng.random() < 0.5:
            event = Finished(int(rng.choice(running)))
            with_it.step(now, event)
            without.step(now, event)
        else:
            work, gpus = float(rng.integers(10, 100)), int(rng.choice([1, 1, 2]))
            with_it.submit(now, work, gpus)
            without.submit(now, work, gpus, phases=None)
        np.testing.assert_array_equal(with_it.scheduler.view.gpus, without.scheduler.view.gpus)
        beside = with_it.early.beside
        assert len(set(beside.values())) == len(beside), "one at most beside each"
        view = with_it.scheduler.view
        assert all(view.gpus[view.row(j)] == 0 and view.gpus[view.row(h)] == 1 for j, h in beside.items())
