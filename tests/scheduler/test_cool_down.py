"""A job that was just resized is left alone while only measurements come in; anything else is decided on at once."""

from __future__ import annotations

from shoal.core.cluster import Cluster, Node
from shoal.core.events import Finished, Measured, Submitted
from shoal.core.job import GpuRange, Job
from shoal.core.profile import Profile
from shoal.policies.registry import make_policy
from shoal.scheduler.scheduler import Scheduler

STEEP = Profile.of("steep", {1: 1.0, 2: 0.5, 3: 0.34, 4: 0.25})
FLAT = Profile.of("flat", {1: 1.0, 2: 0.99, 3: 0.98, 4: 0.97})


def two_jobs(cool_down_s: float) -> Scheduler:
    scheduler = Scheduler(
        Cluster((Node("n", 4, "v100"),), ()), make_policy("optimus"), cool_down_s=cool_down_s
    )
    jobs = [Job(f"j{i}", 0.0, GpuRange(1, 4), 4, iterations=1000.0) for i in range(2)]
    scheduler.step(100.0, [Submitted(i, job, STEEP) for i, job in enumerate(jobs)])
    assert scheduler.view.gpus.tolist() == [2, 2]
    return scheduler


def test_measurements_alone_resize_nobody_until_the_cool_down_is_over() -> None:
    scheduler = two_jobs(cool_down_s=10.0)
    plan = scheduler.step(103.0, [Measured(1, FLAT)])
    assert (plan.commands, plan.wake_s) == ((), 110.0)
    plan = scheduler.step(110.0, [Measured(1, FLAT)])
    assert {c.job: c.share.gpus for c in plan.commands} == {0: 3, 1: 1}


def test_without_a_cool_down_they_resize_at_once() -> None:
    plan = two_jobs(cool_down_s=0.0).step(103.0, [Measured(1, FLAT)])
    assert {c.job: c.share.gpus for c in plan.commands} == {0: 3, 1: 1}


def test_whatever_else_happens_is_decided_on_at_once() -> None:
    plan = two_jobs(cool_down_s=10.0).step(103.0, [Measured(1, FLAT), Finished(0)])
    assert [c.job for c in plan.commands] == [1]
