"""Jobs that run on a GPU of another: who may, who must leave, and that no one's share suffers."""

from __future__ import annotations

import numpy as np
import pytest

from shoal.core.cluster import Cluster, Node
from shoal.core.events import Finished, Submitted
from shoal.core.job import GpuRange, Job
from shoal.core.profile import Profile
from shoal.placement.sharing import SharingRule
from shoal.policies.registry import make_policy
from shoal.scheduler.scheduler import Scheduler
from shoal.scheduler.sharing.colocation import Colocation, ColocationPlan, Need

LIGHT, HALF, HEAVY = Need(4_000, 0.3), Need(4_000, 0.6), Need(4_000, 0.9)
PROFILE = Profile.of("m", {n: 1.0 / n for n in range(1, 5)})


class Small:
    """A scheduler with guests on it; jobs are submitted by need."""

    def __init__(self, gpus=2, policy="fifo", cluster=None, options=None, **rule):
        self.cluster = cluster or Cluster.pool(gpus)
        self.scheduler = Scheduler(self.cluster, make_policy(policy, options or {}))
        self.needs = {}
        self.guests = Colocation(self.scheduler, self.needs.get, 16_000, SharingRule(**rule))
        self.now = 0.0

    def submit(self, *needs, gpus=1, **more):
        events = []
        for need in needs:
            job_id = len(self.needs)
            self.needs[job_id] = need
            job = Job(f"j{job_id}", self.now, GpuRange(gpus, gpus), gpus, iterations=100.0, **more)
            events.append(Submitted(job_id, job, PROFILE))
        return self.step(*events)

    def step(self, *events):
        self.now += 1
        self.scheduler.step(self.now, events)
        return self.guests.step()


def test_who_waits_joins_the_first_job_with_one_gpu_where_it_fits():
    small = Small()
    assert small.submit(HEAVY, HALF) == ColocationPlan(), "both have GPUs of their own"
    assert small.submit(HALF).join == ((2, 1),)  # 0.9 + 0.6 is above 130 %
    assert small.submit(LIGHT).join == ((3, 0),)
    assert small.submit(HALF).join == (), "no GPU has 60 % to spare any more"


def test_memory_counts_the_guests_that_are_there():
    small = Small(gpus=1)
    small.submit(Need(6_000, 0.1))
    assert small.submit(Need(6_000, 0.1)).join == ((1, 0),)
    assert small.submit(Need(6_000, 0.1)).join == ()
    assert small.submit(Need(3_000, 0.1)).join == ((3, 0),)


@pytest.mark.parametrize("need", [None, Need(20_000, 0.1), Need(100, 1.2)])
def test_who_is_not_known_or_does_not_fit_waits(need):
    small = Small(gpus=1)
    small.submit(LIGHT)
    assert small.submit(need) == ColocationPlan()


def test_no_one_joins_a_job_of_which_nothing_is_known_or_that_has_more_gpus():
    small = Small()
    small.submit(None)
    assert small.submit(LIGHT, LIGHT).join == ((2, 1),)
    large = Small()
    large.submit(LIGHT, gpus=2)
    assert large.submit(LIGHT) == ColocationPlan()
    assert large.submit(LIGHT, gpus=2) == ColocationPlan(), "and who wants two is no guest"


@pytest.mark.parametrize(("busy_from", "joins"), [(0.75, ()), (0.6, ((3, 1),))])
def test_nobody_shares_while_the_cluster_is_not_busy_enough(busy_from, joins):
    """Five of eight GPUs are in use; one for one GPU waits behind a larger job, first come first served."""
    small = Small(8, policy="fifo", options={"backfill": "no"}, busy_from=busy_from)
    small.submit(LIGHT, gpus=4)
    small.submit(LIGHT)
    small.submit(LIGHT, gpus=4)
    assert small.submit(LIGHT).join == joins


def test_a_guest_leaves_when_its_host_ends_and_has_a_share_of_its_own_at_once():
    small = Small(gpus=1)
    small.submit(LIGHT)
    small.submit(LIGHT, LIGHT)
    assert small.guests.host_of == {1: 0, 2: 0}
    plan = small.step(Finished(0))
    assert set(plan.leave) == {1, 2}
    assert small.scheduler.view.gpus[small.scheduler.view.row(1)] == 1
    assert plan.join == ((2, 1),), "the other is the guest of the new owner"


def test_a_guest_that_ends_makes_room_for_the_next():
    small = Small(gpus=1)
    small.submit(HALF)
    assert small.submit(HALF, HALF).join == ((1, 0),)
    assert small.step(Finished(1)) == ColocationPlan((1,), ((2, 0),))


def test_guests_respect_types_of_gpus():
    cluster = Cluster((Node("a", 1, "v100"), Node("b", 1, "k80")))
    small = Small(cluster=cluster)
    small.submit(LIGHT, gpu_types=("v100",))
    small.submit(HEAVY, gpu_types=("k80",))
    assert small.submit(LIGHT, gpu_types=("k80",)).join == ((2, 1),)


@pytest.mark.parametrize("policy", ["fifo", "afs-p", "max-min", "srtf"])
@pytest.mark.parametrize("seed", range(3))
def test_whatever_happens_no_gpu_is_crowded_and_the_policy_decides_as_without_guests(policy, seed):
    rng = np.random.default_rng(seed)
    with_guests, without = Small(4, policy), Small(4, policy)
    without.guests.need_of = lambda job: None
    active = set()
    for _ in range(60):
        if active and rng.random() < 0.45:
            job = int(rng.choice(sorted(active)))
            active.discard(job)
            events = [Finished(job)]
            with_guests.step(*events)
            without.step(*events)
        else:
            need = Need(float(rng.integers(1, 9)) * 1000, float(rng.uniform(0.1, 1.0)))
            gpus = int(rng.choice([1, 1, 1, 2]))
            active.add(len(with_guests.needs))
            with_guests.submit(need, gpus=gpus)
            without.submit(need, gpus=gpus)
        view, guests = with_guests.scheduler.view, with_guests.guests
        np.testing.assert_array_equal(view.gpus, without.scheduler.view.gpus)
        for host in set(guests.host_of.values()):
            there = [host, *guests.colocated_with(host)]
            assert view.gpus[view.row(host)] == 1
            assert sum(with_guests.needs[j].utilisation for j in there) < 1.3
            assert sum(with_guests.needs[j].memory_mb for j in there) < 16_000
        for guest in guests.host_of:
            assert view.gpus[view.row(guest)] == 0
            assert view.min_gpus[view.row(guest)] == 1
    assert with_guests.scheduler.plans == without.scheduler.plans
