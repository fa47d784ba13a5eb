"""Limits of users and groups: no history exceeds one, and none leaves a GPU idle that another job could use."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from shoal.core.cluster import Cluster, Group, Node, User
from shoal.core.events import (
    Cancelled,
    Finished,
    Held,
    NodeBack,
    NodeLost,
    PeopleChanged,
    Rescaled,
    Submitted,
    Timer,
)
from shoal.core.job import After, GpuRange, Job, Throttle, When
from shoal.core.limits import WEEK_S, Limits
from shoal.core.profile import Profile
from shoal.core.reason import Code
from shoal.placement.registry import Setting, make_placer
from shoal.policies.registry import make_policy, policy_names
from shoal.scheduler.saved import restore, save
from shoal.scheduler.scheduler import Scheduler

SPEEDS = {n: 4.0 / n**0.8 for n in range(1, 13)}
PROFILE = Profile.of("good", SPEEDS)
TYPED = Profile.from_rows(
    "typed", [(t, n, 0, s * f) for t, f in (("v100", 1), ("k80", 3)) for n, s in SPEEDS.items()]
)
CLUSTERS = {
    "pool": Cluster.pool(12),
    "nodes": Cluster.of(3, 4, rack_nodes=2),
    "mixed": Cluster((Node("a", 4, "v100"), Node("b", 4, "v100"), Node("c", 4, "k80", "rack1"))),
}
USERS = ("ada", "ben", "cyd")


def job(name, gpus="1", user="ada", *, now=0.0, requested=None, work=1e6, **rest):
    size = GpuRange.parse(gpus)
    return Job(name, now, size, requested or size.max, user, "good", work, **rest)


def scheduler_of(users, groups=(), policy="fair-afs", gpus=8, cluster=None):
    made = replace(cluster or Cluster.pool(gpus), users=tuple(users), groups=tuple(groups))
    return Scheduler(made, make_policy(policy))


def submit(scheduler, *jobs, now=0.0):
    first = max(scheduler.jobs, default=-1) + 1
    events = [Submitted(first + i, each, PROFILE) for i, each in enumerate(jobs)]
    return scheduler.step(now, events)


def gpus_of(scheduler, job_id):
    return scheduler.outcome(job_id, scheduler.view.now_s).share.gpus


def reason(scheduler, job_id):
    return scheduler.outcome(job_id, scheduler.view.now_s).reason


class History:
    """A random history of one cluster, and what the commands alone say about it."""

    def __init__(self, policy: str, cluster: Cluster, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.cluster = replace(cluster, users=self.random_users(), groups=self.random_groups())
        self.policy_name = policy
        made = make_policy(policy)
        self.profiles = {}
        self.scheduler = Scheduler(self.cluster, made, self.placer(made), week_begin_s=0.0)
        self.now, self.next_id, self.wake_s = 0.0, 0, np.inf
        self.jobs: dict[int, Job] = {}
        self.shares: dict[int, tuple[int, str]] = {}
        self.ends: dict[int, bool] = {}
        #: GPU-seconds by user in the present week, by the commands alone.
        self.used = dict.fromkeys(USERS, 0.0)
        self.lost: set[int] = set()
        #: Limits of GPU hours that held at the last decision and were not exceeded when they were set.
        self.checked_hours = {}

    def placer(self, policy):
        word = "auto" if self.cluster.pooled else "keep-and-pack"
        setting = Setting(self.cluster, policy.elastic, lambda: self.profiles, move_s=1.0)
        return make_placer(word, setting)

    def chance(self, p):
        return self.rng.random() < p

    def random_limits(self):
        def pick(p, low, high):
            return int(self.rng.integers(low, high)) if self.chance(p) else None

        by_type = (("v100", int(self.rng.integers(0, 6))),) if self.chance(0.3) else ()
        hours = float(self.rng.uniform(0.0, 3.0)) if self.chance(0.3) else None
        return Limits(pick(0.6, 0, 9), by_type, pick(0.4, 0, 4), None, hours)

    def random_users(self):
        groups = [str(self.rng.choice(["", "lab"])) for _ in USERS]
        return tuple(
            User(n, float(self.rng.integers(1, 4)), self.random_limits(), g) for n, g in zip(USERS, groups)
        )

    def random_groups(self):
        tickets = float(self.rng.integers(1, 4)) if self.chance(0.5) else None
        return (Group("lab", tickets, self.random_limits() if self.chance(0.7) else Limits()),)

    def random_job(self):
        least = int(self.rng.integers(1, 5))
        most = least + int(self.rng.integers(0, 6)) * int(self.chance(0.7))
        top = 4 if len(self.cluster.gpu_types) > 1 else 12
        least, most = min(least, top), min(most, top)
        after = ()
        if self.jobs and self.chance(0.15):
            other = int(self.rng.choice(list(self.jobs)))
            after = (After(other, When(str(self.rng.choice(["success", "failure", "any"])))),)
        throttle = Throttle("sweep", 2) if self.chance(0.15) else None
        return Job(
            f"job{self.next_id}", self.now, GpuRange(least, most),
            int(self.rng.integers(least, most + 1)), str(self.rng.choice(USERS)), "good",
            float(self.rng.uniform(1e3, 1e5)), priority=int(self.rng.integers(-1, 3)), after=after,
            throttle=throttle,
            not_before_s=self.now + 100.0 if self.chance(0.1) else 0.0,
        )  # fmt: skip

    def random_event(self):
        active = list(self.jobs)
        kind = self.rng.random()
        if kind < 0.4 or not active:
            made, profile = self.random_job(), TYPED if len(self.cluster.gpu_types) > 1 else PROFILE
            self.next_id += 1
            self.jobs[self.next_id - 1] = made
            self.profiles[self.next_id - 1] = profile
            return Submitted(self.next_id - 1, made, profile)
        chosen = int(self.rng.choice(active))
        if kind < 0.55:
            return self.leave(chosen)
        if kind < 0.65:
            return Held(chosen, self.chance(0.5))
        if kind < 0.75:
            low = int(self.rng.integers(1, 4))
            self.jobs[chosen] = replace(self.jobs[chosen], gpus=GpuRange(low, 4), requested_gpus=4)
            return Rescaled(chosen, low, 4, 4)
        if kind < 0.85:
            self.cluster = replace(self.cluster, users=self.random_users(), groups=self.random_groups())
            return PeopleChanged(self.cluster.users, self.cluster.groups)
        if kind < 0.92 and not self.cluster.pooled:
            node = int(self.rng.integers(0, 3))
            if node in self.lost:
                self.lost.discard(node)
                return NodeBack(node)
            if len(self.lost) < 2:
                self.lost.add(node)
                return NodeLost(node)
        return Timer()

    def leave(self, job_id):
        del self.jobs[job_id]
        self.ends[job_id] = self.chance(0.7)
        if not self.ends[job_id] and self.chance(0.5):
            return Cancelled(job_id)
        return Finished(job_id, self.ends[job_id])

    def advance(self):
        """Time passes, up to the time that the scheduler asked for."""
        until = self.now + float(self.rng.choice([0.0, 10.0, 600.0, 20000.0, WEEK_S / 3]))
        events = []
        if self.wake_s <= until:
            until, events = self.wake_s, [Timer()]
        week = int(self.now // WEEK_S)
        if int(until // WEEK_S) != week:
            self.used = dict.fromkeys(USERS, 0.0)
        span = until - max(self.now, int(until // WEEK_S) * WEEK_S)
        for job_id, (gpus, _) in self.shares.items():
            self.used[self.scheduler.jobs[job_id].user] += gpus * span
        self.now = until
        return events

    def step(self):
        before = dict(self.shares)
        events = self.advance()
        self.check_hours()
        events += [self.random_event() for _ in range(int(self.rng.integers(1, 4)))]
        if self.chance(0.2):
            self.restart()
        plan = self.scheduler.step(self.now, events)
        for event in events:
            if isinstance(event, (Finished, Cancelled)):
                self.shares.pop(event.job_id, None)
        for command in plan.commands:
            if command.share:
                self.shares[command.job] = command.share.gpus, command.share.gpu_type
            else:
                assert command.job in before, "a job without GPUs was paused"
                self.shares.pop(command.job, None)
        self.wake_s = plan.wake_s
        assert plan.wake_s > self.now
        self.check()

    def restart(self):
        saved = json.loads(json.dumps(save(self.scheduler)))
        policy = make_policy(self.policy_name)
        jobs, profiles = dict(self.scheduler.jobs), dict(self.scheduler.profiles)
        before = self.scheduler
        self.scheduler = restore(
            saved, before.cluster, policy, jobs, profiles, self.placer(policy), week_begin_s=0.0
        )

    def holders(self):
        """(limits, names of the users) of everybody who has limits."""
        for user in self.cluster.users:
            yield user.limits, {user.name}
        for group in self.cluster.groups:
            yield group.limits, {u.name for u in self.cluster.users if u.group == group.name}

    def mine(self, names):
        return {i: s for i, s in self.shares.items() if self.scheduler.jobs[i].user in names}

    def check_hours(self):
        for limits, names in self.holders():
            if limits.gpu_hours_per_week is not None and self.checked_hours.get(frozenset(names)) == limits:
                used_h = sum(self.used[n] for n in names) / 3600.0
                assert used_h <= limits.gpu_hours_per_week + 1e-6

    def check(self):
        view = self.scheduler.view
        decided = {
            i: (int(g), view.gpu_types[t])
            for i, g, t in zip(view.job_ids.tolist(), view.gpus.tolist(), view.gpu_type.tolist())
            if g
        }
        assert decided == self.shares, "the commands say otherwise than the scheduler"
        self.checked_hours = {}
        for limits, names in self.holders():
            mine = self.mine(names)
            if limits.max_gpus is not None:
                assert sum(g for g, _ in mine.values()) <= limits.max_gpus
            if limits.max_running_jobs is not None:
                assert len(mine) <= limits.max_running_jobs
            for gpu_type, most in limits.max_gpus_of_type:
                assert sum(g for g, t in mine.values() if t == gpu_type) <= most
            if limits.gpu_hours_per_week is not None:
                used_h = sum(self.used[n] for n in names) / 3600.0
                if used_h >= limits.gpu_hours_per_week:
                    assert not mine
                else:
                    self.checked_hours[frozenset(names)] = limits
        sweep = [i for i in self.shares if self.scheduler.jobs[i].throttle]
        assert len(sweep) <= 2
        for job_id in self.shares:
            made = self.jobs[job_id]
            assert made.not_before_s <= self.now
            for after in made.after:
                assert after.job_id not in self.jobs
                assert after.when.allows(self.ends[after.job_id])
        for outcome in self.scheduler.outcomes(self.now):
            assert outcome.reason is not None or outcome.share.gpus >= outcome.wish_gpus

    def check_idle(self):
        """No job could start on the GPUs that are free, in a pool, within every limit."""
        policy = self.scheduler.policy
        if not self.cluster.pooled or not policy.backfills:
            return
        free = self.scheduler.supply.total_gpus - sum(g for g, _ in self.shares.values())
        for job_id in self.jobs:
            if job_id in self.shares or job_id in self.scheduler.held or self.has_conditions(job_id):
                continue
            made = self.scheduler.jobs[job_id]
            need = made.gpus.min
            if not policy.elastic:
                need = max(min([made.requested_gpus, *self.gpu_limits(made.user)]), need)
            assert not (need <= free and self.fits(made, need)), f"{job_id} could run: {free} are free"

    def has_conditions(self, job_id):
        made = self.scheduler.jobs[job_id]
        if made.throttle and sum(1 for i in self.shares if self.scheduler.jobs[i].throttle) >= 2:
            return True
        return bool(made.after) or made.not_before_s > self.now or job_id in self.scheduler.admission.never

    def gpu_limits(self, user):
        return [
            limit
            for limits, names in self.holders()
            if user in names
            for limit in (limits.max_gpus,)
            if limit is not None
        ]

    def fits(self, made, need):
        for limits, names in self.holders():
            if made.user not in names:
                continue
            mine = self.mine(names)
            if limits.max_gpus is not None and sum(g for g, _ in mine.values()) + need > limits.max_gpus:
                return False
            if limits.max_running_jobs is not None and len(mine) >= limits.max_running_jobs:
                return False
            hours = limits.gpu_hours_per_week
            if hours is not None and sum(self.used[n] for n in names) / 3600.0 >= hours - 1e-6:
                return False
        return True


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("policy", policy_names())
def test_no_random_history_exceeds_a_limit(policy, cluster):
    for seed in range(6):
        history = History(policy, CLUSTERS[cluster], seed)
        for _ in range(40):
            history.step()
            history.check_idle()


def test_a_limit_of_gpus_holds_and_says_so():
    scheduler = scheduler_of([User("ada", limits=Limits(max_gpus=4)), User("ben")])
    submit(scheduler, job("a", "2"), job("b", "2"), job("c", "1..8"), job("d", "6"), job("e", "1..2", "ben"))
    assert [gpus_of(scheduler, i) for i in range(5)] == [2, 2, 0, 0, 2]
    full = reason(scheduler, 2)
    assert full.code is Code.QUOTA_EXHAUSTED
    assert full.sentence.startswith("the limit of user ada is 4 GPUs, and 4 are in use; it frees up when")
    assert full.evidence["limit"] == "max_gpus"
    assert (full.evidence["limit_value"], full.evidence["in_use"]) == (4, 4)
    never = reason(scheduler, 3)
    assert (never.code, never.sentence) == (
        Code.EXCEEDS_LIMIT,
        "it needs 6 GPUs; the limit of user ada is 4 GPUs",
    )


def test_a_job_at_its_users_limit_says_why_it_does_not_grow():
    scheduler = scheduler_of([User("ada", limits=Limits(max_gpus=4))])
    submit(scheduler, job("a", "1..8"))
    assert gpus_of(scheduler, 0) == 4
    assert str(reason(scheduler, 0)) == "ExceedsLimit: it has 4 GPUs; the limit of user ada is 4 GPUs"


def test_users_of_a_group_divide_its_limit_by_tickets():
    users = [User("ada", 3, group="lab"), User("ben", 1, group="lab"), User("cyd")]
    scheduler = scheduler_of(users, [Group("lab", limits=Limits(max_gpus=8))], gpus=16)
    submit(scheduler, *(job(f"a{i}", "1..8") for i in range(4)))
    assert sum(gpus_of(scheduler, i) for i in range(4)) == 8
    submit(scheduler, job("b", "1..8", "ben"), now=1.0)
    assert sum(gpus_of(scheduler, i) for i in range(4)) == 6
    assert gpus_of(scheduler, 4) == 2


def test_the_tickets_of_a_group_are_divided_among_its_active_users():
    users = [User("ada", 1, group="lab"), User("ben", 1, group="lab"), User("cyd", 1)]
    scheduler = scheduler_of(users, [Group("lab", tickets=1.0)], gpus=12)
    submit(scheduler, job("a", "1..12"), job("b", "1..12", "ben"), job("c", "1..12", "cyd"))
    assert [gpus_of(scheduler, i) for i in range(3)] == [3, 3, 6]
    scheduler.step(1.0, [Finished(1)])
    assert [gpus_of(scheduler, i) for i in (0, 2)] == [6, 6]


def test_gpu_hours_of_a_week_end_jobs_when_used_up_and_come_back_on_monday():
    scheduler = scheduler_of([User("ada", limits=Limits(gpu_hours_per_week=2.0))])
    plan = submit(scheduler, job("a", "4"), now=100.0)
    assert plan.wake_s == pytest.approx(100.0 + 1800.0)
    plan = scheduler.step(plan.wake_s, [Timer()])
    assert gpus_of(scheduler, 0) == 0
    text = str(reason(scheduler, 0))
    assert text == "QuotaExhausted: user ada has used 2.0 of 2 GPU hours of this week; the next begins in 7 d"
    assert plan.wake_s == WEEK_S
    scheduler.step(plan.wake_s, [Timer()])
    assert gpus_of(scheduler, 0) == 4


def test_a_lower_limit_shrinks_running_jobs_at_once():
    scheduler = scheduler_of([User("ada"), User("ben")])
    submit(scheduler, job("a", "1..8"), job("b", "2"))
    limited = (User("ada", limits=Limits(max_gpus=3)),)
    plan = scheduler.step(1.0, [PeopleChanged(limited, ())])
    assert sum(gpus_of(scheduler, i) for i in range(2)) == 3
    assert {c.verb for c in plan.commands} == {"shrink"}


def test_gpus_that_a_limit_reserves_in_vain_go_to_a_smaller_job():
    """Of eight GPUs ben has five. Ada may have six, but her first job needs four, and only three are free."""
    scheduler = scheduler_of([User("ada", limits=Limits(max_gpus=5)), User("ben")], policy="fifo")
    submit(scheduler, job("b", "5", "ben"))
    plan = submit(scheduler, job("a1", "4"), job("a2", "3"), now=1.0)
    assert gpus_of(scheduler, 2) == 3
    assert [(c.job, c.verb) for c in plan.commands] == [(2, "start")]
    assert reason(scheduler, 1).code is Code.WAITING_FOR_CAPACITY
    scheduler.step(2.0, [Finished(0)])
    assert [gpus_of(scheduler, i) for i in (1, 2)] == [0, 3]
    assert reason(scheduler, 1).code is Code.QUOTA_EXHAUSTED


def test_at_most_so_many_jobs_run_and_the_others_follow_by_priority():
    scheduler = scheduler_of([User("ada", limits=Limits(max_running_jobs=1))])
    submit(scheduler, job("a", "2"), job("b", "2"), job("c", "2", priority=5))
    assert [gpus_of(scheduler, i) for i in range(3)] == [0, 0, 2]
    assert "the limit of user ada is 1 running job, and 1 is in use" in reason(scheduler, 0).sentence
    scheduler.step(1.0, [Finished(2)])
    assert [gpus_of(scheduler, i) for i in range(2)] == [2, 0]


@pytest.mark.parametrize("policy", [name for name in policy_names() if name != "tiresias-g"])
def test_priority_orders_a_users_own_jobs_and_takes_nothing_from_others(policy):
    def shares(priority):
        users = [User("ada"), User("ben")]
        cluster = replace(Cluster.of(1, 4), users=tuple(users))
        made = make_policy(policy)
        placer = make_placer("auto", Setting(cluster, made.elastic, dict, move_s=1.0))
        scheduler = Scheduler(cluster, made, placer)
        submit(
            scheduler, job("a", "2"), job("b", "2", "ben"), job("c", "2"), job("d", "2", priority=priority)
        )
        scheduler.step(2.0, [Finished(0)])
        submit(scheduler, job("e", "2", "ben"), now=3.0)
        return [gpus_of(scheduler, i) for i in range(1, 5)]

    plain, ranked = shares(0), shares(7)
    assert (ranked[1], ranked[2]) == (0, 2)
    assert [plain[0] + plain[3], plain[1] + plain[2]] == [ranked[0] + ranked[3], ranked[1] + ranked[2]]


def test_an_elastic_job_of_a_higher_priority_grows_first():
    scheduler = scheduler_of([User("ada"), User("ben")], gpus=12)
    submit(scheduler, job("a", "1..6"), job("b", "1..6", priority=1), job("c", "1..12", "ben"))
    assert [gpus_of(scheduler, i) for i in range(3)] == [1, 5, 6]


def test_conditions_keep_a_job_back_until_they_hold():
    scheduler = scheduler_of([User("ada")])
    plan = submit(
        scheduler,
        job("a", "1"),
        job("b", "1", after=(After(0),)),
        job("c", "1", after=(After(0, When.FAILURE),)),
        job("d", "1", after=(After(0, When.ANY),)),
        job("e", "1", not_before_s=50.0),
    )
    assert [gpus_of(scheduler, i) for i in range(5)] == [1, 0, 0, 0, 0]
    assert str(reason(scheduler, 1)) == "Dependency: it waits for the success of a"
    assert str(reason(scheduler, 4)) == "NotBefore: its owner lets it start in 50 s, not before"
    assert plan.wake_s == 50.0
    scheduler.step(10.0, [Finished(0, succeeded=True)])
    assert [gpus_of(scheduler, i) for i in range(1, 5)] == [1, 0, 1, 0]
    assert "can never run" in reason(scheduler, 2).sentence
    assert list(scheduler.admission.never) == [2]
    scheduler.step(50.0, [Timer()])
    assert gpus_of(scheduler, 4) == 1


def test_an_array_runs_so_many_jobs_at_once():
    scheduler = scheduler_of([User("ada")])
    submit(scheduler, *(job(f"t{i}", "1", throttle=Throttle("7", 3)) for i in range(6)))
    assert [gpus_of(scheduler, i) for i in range(6)] == [1, 1, 1, 0, 0, 0]
    assert "the limit of its array is 3 running jobs" in reason(scheduler, 3).sentence
    scheduler.step(1.0, [Finished(1)])
    assert gpus_of(scheduler, 3) == 1
