"""Jobs with a step in their range: their shares are multiples of it, and the rest goes to others."""

from __future__ import annotations

import pytest

from shoal.core.cluster import Cluster
from shoal.core.errors import ShoalError
from shoal.core.events import Capped, NodeLost, Rescaled, Submitted
from shoal.core.job import GpuRange, Job
from shoal.core.profile import Profile
from shoal.placement.registry import Setting, make_placer
from shoal.policies.registry import make_policy, policy_names
from shoal.scheduler.scheduler import Scheduler

SPEED = Profile.of("good", {n: 4.0 / n**0.9 for n in range(1, 17)})


def scheduler_of(policy: str, cluster: Cluster) -> Scheduler:
    made = make_policy(policy, {}, seed=1)
    placer = make_placer("auto", Setting(cluster, made.elastic, dict, move_s=1.0))
    return Scheduler(cluster, made, placer)


def submit(scheduler: Scheduler, *ranges: str, now_s: float = 0.0) -> dict[int, int]:
    for text in ranges:
        gpus = GpuRange.parse(text)
        job = Job(f"j{len(scheduler.jobs)}", now_s, gpus, gpus.min, iterations=1000.0)
        scheduler.step(now_s, [Submitted(len(scheduler.jobs), job, SPEED)])
    return shares(scheduler)


def shares(scheduler: Scheduler) -> dict[int, int]:
    return dict(zip(scheduler.view.job_ids.tolist(), scheduler.view.gpus.tolist()))


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("4", (4, 4, 1)),
        ("1..8", (1, 8, 1)),
        ("2..8:2", (2, 8, 2)),
        (" 3 .. 9 : 3 ", (3, 9, 3)),
        ("4:2", (4, 4, 2)),
    ],
)
def test_a_range_is_read(text: str, sizes: tuple[int, int, int]):
    gpus = GpuRange.parse(text)
    assert (gpus.min, gpus.max, gpus.step) == sizes
    if gpus.min != gpus.max:
        assert GpuRange.parse(str(gpus)) == gpus


@pytest.mark.parametrize(
    ("text", "help_"),
    [
        ("3..8:2", "write 4..8:2"),
        ("2..9:2", "write 2..8:2"),
        ("1..3:4", "write 4"),
        ("5:2", "no multiples of 2: write 6"),
        ("2..8:0", "the step of a range must be at least 1"),
        ("2..8:", "2..8:2 for multiples of 2"),
    ],
)
def test_a_range_that_is_no_multiple_says_what_to_write(text: str, help_: str):
    with pytest.raises(ShoalError, match=help_):
        GpuRange.parse(text)


def grows(scheduler: Scheduler) -> bool:
    """Whether the policy gives a job more than it requests."""
    return bool((scheduler.policy.wish_gpus(scheduler.view) > scheduler.view.requested_gpus).any())


@pytest.mark.parametrize("policy", policy_names())
def test_a_job_that_takes_pairs_leaves_the_odd_gpu_to_others(policy: str):
    scheduler = scheduler_of(policy, Cluster.pool(7))
    assert submit(scheduler, "2..8:2", "1..1") == {0: 6 if grows(scheduler) else 2, 1: 1}


@pytest.mark.parametrize("policy", [name for name in policy_names() if name != "gandiva-fair"])
def test_gpus_that_no_step_fits_start_a_job_that_waits(policy: str):
    scheduler = scheduler_of(policy, Cluster.pool(8))
    found = submit(scheduler, "3..9:3", "3..9:3", "2..2")
    assert found == {0: 3, 1: 3, 2: 2}


def test_a_decision_is_stable():
    scheduler = scheduler_of("afs-l", Cluster.pool(9))
    submit(scheduler, "2..8:2", "2..8:2", "2..8:2", "1..3")
    for second in range(1, 6):
        plan = scheduler.step(float(second), [])
        assert not len(plan.changes)


def test_why_names_the_step():
    scheduler = scheduler_of("max-min", Cluster.pool(8))
    submit(scheduler, "4..8:4", "1..1")
    reason = scheduler.outcome(0, 0.0).reason
    assert reason is not None
    assert reason.sentence == "it has 4 GPUs; it takes them in steps of 4, and only 3 are free"
    assert reason.evidence["step_gpus"] == 4


def test_the_autoscalers_limit_is_a_multiple():
    scheduler = scheduler_of("max-min", Cluster.pool(8))
    submit(scheduler, "2..8:2")
    scheduler.step(1.0, [Capped(0, 5, "it tries 5")])
    assert shares(scheduler) == {0: 4}


def test_a_new_range_keeps_the_step():
    scheduler = scheduler_of("max-min", Cluster.pool(8))
    submit(scheduler, "2..8:2")
    scheduler.step(1.0, [Rescaled(0, 4, 6)])
    assert scheduler.jobs[0].gpus == GpuRange(4, 6, 2)
    assert shares(scheduler) == {0: 6}


def test_a_lost_node_leaves_a_multiple():
    scheduler = scheduler_of("max-min", Cluster.of(3, 3))
    assert submit(scheduler, "2..8:2") == {0: 8}
    scheduler.step(1.0, [NodeLost(int(scheduler.placements[0][0][0]))])
    assert shares(scheduler) == {0: 6}
    assert sum(g for _, g in scheduler.placements[0]) == 6
