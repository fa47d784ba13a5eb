"""What must never happen, whatever happens: a machine that feeds the scheduler random events."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from shoal.core.cluster import Cluster, Node, User
from shoal.core.events import (
    Cancelled,
    Capped,
    Finished,
    Held,
    Measured,
    NodeBack,
    NodeLost,
    Rescaled,
    Submitted,
    TicketsChanged,
    Timer,
)
from shoal.core.job import GpuRange, Job, Kind
from shoal.core.plan import NO_SHARE, CauseKind, Share
from shoal.core.profile import Profile, SpeedCurve
from shoal.core.reason import Code
from shoal.placement.registry import Setting, make_placer, placement_names
from shoal.policies.registry import make_policy, policy_class, policy_names
from shoal.scheduler.saved import restore, save
from shoal.scheduler.scheduler import Scheduler

CLUSTERS = {
    "pool": Cluster.pool(10, users=[User("ada", 2), User("ben")]),
    "nodes": Cluster.of(3, 4, rack_nodes=2).with_users([User("ada", 2), User("ben")]),
    "mixed": Cluster(
        (Node("a", 4, "v100"), Node("b", 4, "v100"), Node("c", 4, "k80", "rack1")),
        (User("ada", 2), User("ben")),
    ),
}
SLOW = {n: 4.0 / n**0.8 for n in range(1, 13)}
FAST = {n: 1.0 / n**0.6 for n in range(1, 9)}
PROFILES = (
    Profile.of("good", SLOW),
    Profile.of("poor", FAST),
    Profile.from_rows(
        "typed", [(t, n, 0, s * f) for t, f in (("v100", 1), ("k80", 3)) for n, s in SLOW.items()]
    ),
)


def spread(profile):
    """The profile with a slower curve for two nodes and more, so that moving can pay."""
    return Profile(
        profile.model, {t: {**c, 2: SpeedCurve(0.7 * c[0].speed)} for t, c in profile.curves.items()}
    )


PROFILES = tuple(spread(p) for p in PROFILES)
PLACEMENTS = [name for name in placement_names() if name not in ("auto", "pool", "liquid-batch")]
PLACEMENTS += ["liquid-batch:max_plans=40"]

#: Each policy as it is, and with other options of those that have any.
SETTINGS = [(name, {}) for name in policy_names()] + [
    ("fifo", {"backfill": "no"}),
    ("tiresias-l", {"thresholds_gpu_s": "20,100", "promote": "2", "service": "attained"}),
    ("tiresias-g", {"distribution_gpu_s": "5,50,500", "promote": "1"}),
    ("themis", {"lease_s": "60"}),
    ("afs-l", {"fold": "shortest"}),
    ("afs-p", {"quantum_s": "30", "tie": "first"}),
    ("afs-p", {"tie": "last"}),
    ("afs-p", {"tie": "coin"}),
    ("gandiva-fair", {"trading": "no", "tie_order": "widest", "profiling": "user"}),
    ("fair-afs", {"inside": "afs-l", "slack": "0.2"}),
]
#: Whose placement puts a job anywhere, so that free GPUs of a type are as good as a pool of them.
ANYWHERE = ("keep-and-pack", "moving")


def placer(cluster, policy, name, profiles):
    word = "auto" if cluster.pooled else name
    return make_placer(word, Setting(cluster, policy.elastic, lambda: profiles, move_s=1.0))


JOBS = st.fixed_dictionaries(
    {
        "least": st.integers(1, 4),
        "more": st.integers(0, 8),
        "profile": st.integers(0, 2),
        "user": st.sampled_from(["ada", "ben"]),
        "work": st.floats(1, 500),
        "ps": st.booleans(),
        "step": st.sampled_from([1, 1, 2, 3]),
    }
)


class Safety(RuleBasedStateMachine):
    """Two schedulers see the same events: one goes on, the other is saved and restored now and then."""

    #: Set by `machine`.
    setting: tuple[str, dict[str, str]]
    cluster: Cluster

    @initialize(placement=st.sampled_from(PLACEMENTS), first=st.lists(JOBS, min_size=3, max_size=6))
    def begin(self, placement, first):
        self.placement = placement
        one = make_policy(*self.setting, seed=7)
        self.jobs, self.profiles = {}, {}
        self.one = Scheduler(self.cluster, one, self.placer(one))
        two = make_policy(*self.setting, seed=7)
        self.two = Scheduler(self.cluster, two, self.placer(two))
        self.now = 0.0
        self.next_id = 0
        self.wake_s = np.inf
        self.lost = set()
        #: The share and placement of each job by the commands alone.
        self.replayed = {}
        for job in first:
            self.add(**job)

    def placer(self, policy):
        return placer(self.cluster, policy, self.placement, self.profiles)

    def step(self, *events):
        plan = self.one.step(self.now, events)
        again = self.two.step(self.now, events)
        assert plan.commands == again.commands, "the same state and the same events, but other commands"
        assert plan.wake_s == again.wake_s
        assert plan.wake_s > self.now or np.isinf(plan.wake_s)
        self.wake_s = plan.wake_s
        self.check_commands(plan, events)
        for scheduler in (self.one, self.two):
            view = scheduler.view
            for command in plan.commands:
                if command.job in view:
                    row = view.row(command.job)
                    profile = self.profiles[command.job]
                    rate = profile.speed(command.share.gpu_type, command.share.gpus) if command.share else 0.0
                    left = float(view.remaining_now(self.now)[row])
                    scheduler.observe(command.job, left, rate, self.now)

    def check_commands(self, plan, events):
        seen = [c.job for c in plan.commands]
        assert len(set(seen)) == len(seen), "two commands for one job"
        releases = [c.verb in ("pause", "shrink") for c in plan.commands]
        assert releases == sorted(releases, reverse=True), "a release after another command"
        for event in events:
            if isinstance(event, (Finished, Cancelled)):
                self.replayed.pop(event.job_id, None)
        for command in plan.commands:
            before = self.replayed.pop(command.job, (NO_SHARE, ()))
            after = (command.share, command.placement)
            assert before != after, "a command that changes nothing"
            assert command.verb == expected_verb(before[0].gpus, command.share.gpus, command.verb)
            self.check_cause(command, events)
            if command.share:
                self.replayed[command.job] = after
            if command.job in self.one.held:
                assert not command.share
                continue
            row = self.one.view.row(command.job)
            assert command.generation == self.one.view.generation[row]
            if not self.cluster.pooled and command.share:
                assert sum(g for _, g in command.placement) == command.share.gpus

    def check_cause(self, command, events):
        """A change that an event forced names that event."""
        if command.cause.kind is CauseKind.DECIDED:
            assert command.job not in self.one.held
            return
        event = events[command.cause.event - self.one.events_seen + len(events)]
        if command.cause.kind is CauseKind.HELD:
            assert event == Held(command.job, True)
        else:
            assert event == NodeLost(command.cause.node)

    @rule(job=JOBS, later=st.floats(0, 50))
    def submit(self, job, later):
        self.now += later
        self.add(**job)

    def add(self, least, more, profile, user, work, ps, step):
        profile = PROFILES[profile]
        if profile.model == "typed" and self.cluster is not CLUSTERS["mixed"]:
            profile = PROFILES[0]
        top = min(least + more, 8)
        ps = ps and step == 1
        if step > 1:
            least, top = -(-least // step) * step, max(top // step, -(-least // step)) * step
        kind = Kind.PARAMETER_SERVER if ps else Kind.ALL_REDUCE
        types = ("v100",) if self.cluster is CLUSTERS["mixed"] and more == 1 else ()
        want = (least + top) // 2
        if not self.cluster.pooled:
            want = min(want, 4) if types else want
        want = max(want - want % step, least)
        job = Job(
            f"j{self.next_id}",
            self.now,
            GpuRange(least, top, step),
            want,
            user,
            iterations=work,
            kind=kind,
            gpu_types=types,
        )
        self.jobs[self.next_id], self.profiles[self.next_id] = job, profile
        self.next_id += 1
        self.step(Submitted(self.next_id - 1, job, profile))

    @precondition(lambda self: self.jobs)
    @rule(pick=st.randoms(use_true_random=False), later=st.floats(0.1, 50), finished=st.booleans())
    def leave(self, pick, later, finished):
        running = [j for j in self.jobs if j in self.one.view and self.one.view.gpus[self.one.view.row(j)]]
        everyone = running if finished else list(self.jobs)
        if not everyone:
            return
        self.now += later
        job = pick.choice(everyone)
        del self.jobs[job]
        self.step(Finished(job) if finished else Cancelled(job))

    @precondition(lambda self: self.jobs)
    @rule(pick=st.randoms(use_true_random=False), held=st.booleans(), later=st.floats(0, 10))
    def hold(self, pick, held, later):
        self.now += later
        self.step(Held(pick.choice(list(self.jobs)), held))

    @precondition(lambda self: self.jobs)
    @rule(pick=st.randoms(use_true_random=False), least=st.integers(1, 3), more=st.integers(0, 5))
    def rescale(self, pick, least, more):
        self.now += 1
        job_id = pick.choice(list(self.jobs))
        step = self.jobs[job_id].gpus.step
        least = -(-least // step) * step
        self.step(Rescaled(job_id, least, max(min(least + more, 8) // step * step, least)))
        self.jobs[job_id] = self.one.jobs[job_id]

    @precondition(lambda self: self.jobs)
    @rule(pick=st.randoms(use_true_random=False), gpus=st.none() | st.integers(1, 9))
    def cap(self, pick, gpus):
        self.now += 1
        self.step(Capped(pick.choice(list(self.jobs)), gpus, "the autoscaler holds it"))

    @precondition(lambda self: self.jobs)
    @rule(pick=st.randoms(use_true_random=False), profile=st.integers(0, 1))
    def measure(self, pick, profile):
        self.now += 1
        job_id = pick.choice(list(self.jobs))
        self.profiles[job_id] = PROFILES[profile]
        self.step(Measured(job_id, PROFILES[profile]))

    @rule(later=st.floats(0, 10_000))
    def tick(self, later):
        self.now = min(self.now + later, max(self.wake_s, self.now))
        self.step(Timer())

    @rule(user=st.sampled_from(["ada", "ben", "cho"]), tickets=st.sampled_from([0.5, 1.0, 3.0]))
    def change_tickets(self, user, tickets):
        self.now += 1
        self.step(TicketsChanged(user, tickets))

    @precondition(lambda self: not self.cluster.pooled)
    @rule(node=st.integers(0, 2))
    def lose_or_get_back_a_node(self, node):
        self.now += 1
        if node in self.lost:
            self.lost.discard(node)
            self.step(NodeBack(node))
        elif len(self.lost) < 2:
            self.lost.add(node)
            self.step(NodeLost(node))

    @rule()
    def save_and_restore(self):
        saved = json.loads(json.dumps(save(self.two)))
        policy = make_policy(*self.setting, seed=99)  # the seed comes back with the state
        self.two = restore(saved, self.two.cluster, policy, self.jobs, self.profiles, self.placer(policy))

    # -- what must hold after every step -----------------------------------------------------------

    @invariant()
    def never_more_gpus_than_there_are(self):
        if not hasattr(self, "one"):
            return
        view, supply = self.one.view, self.one.supply
        assert view.gpus.sum() <= supply.total_gpus
        for t, limit in enumerate(supply.gpus_of_type):
            assert view.gpus[view.gpu_type == t].sum() <= limit
        if not self.cluster.pooled:
            used = np.zeros(len(self.cluster.nodes), int)
            for job_id, placement in self.one.placements.items():
                row = view.row(job_id)
                assert sum(g for _, g in placement) == view.gpus[row]
                for node, gpus in placement:
                    used[node] += gpus
                    assert self.cluster.type_of_node[node] == view.gpu_type[row]
            assert (used <= supply.gpus_of_node).all(), "a node holds more than it has"

    @invariant()
    def the_commands_alone_lead_to_the_shares_and_placements(self):
        if not hasattr(self, "one"):
            return
        assert self.replayed == shares_of(self.one)

    @invariant()
    def never_a_partial_gang_and_never_above_the_maximum(self):
        if not hasattr(self, "one"):
            return
        view = self.one.view
        for row, job_id in enumerate(view.job_ids.tolist()):
            job, gpus = self.one.jobs[job_id], int(view.gpus[row])
            if gpus == 0:
                continue
            assert job.gpus.min <= gpus <= job.gpus.max
            assert gpus % job.gpus.step == 0, "a share that is no multiple of the job's step"
            if not self.one.policy.elastic:
                assert gpus == job.requested_gpus
            elif job_id in self.one.caps:
                assert gpus <= max(self.one.caps[job_id].gpus, job.gpus.min)
            if job.gpu_types:
                assert self.cluster.gpu_types[view.gpu_type[row]] in job.gpu_types

    @invariant()
    def no_gpu_idles_while_a_job_could_use_it(self):
        """Neither one that waits nor, where shares change, one that runs and gains by more."""
        if not hasattr(self, "one") or self.setting == ("fifo", {"backfill": "no"}):
            return
        if not self.cluster.pooled and (self.placement not in ANYWHERE or self.setting[0] == "gandiva-fair"):
            return  # what fits depends on the nodes; of gandiva-fair tests/fair asks it
        view, policy = self.one.view, self.one.policy
        need = view.min_gpus if policy.elastic else view.requested_gpus
        for t, there in enumerate(self.one.supply.gpus_of_type):
            free = there - int(view.gpus[view.gpu_type == t].sum())
            waiting = (view.gpus == 0) & (need <= free) & (need <= view.type_max[t])
            assert not waiting.any(), f"{free} GPUs idle under {self.setting}, and a job waits"
            if policy.elastic:
                # Who has nothing left to do gains nothing.
                growing = (
                    (view.remaining_now(self.now) > 0)
                    & (view.gpu_type == t)
                    & (view.gpus < np.minimum(view.type_max[t], policy.wish_gpus(view)))
                    & (view.step_gpus <= free)
                )
                assert not growing.any(), f"{free} GPUs idle under {self.setting}, and a job could grow"

    @invariant()
    def everyone_without_their_full_wish_has_a_reason(self):
        if not hasattr(self, "one"):
            return
        outcomes = list(self.one.outcomes(self.now))
        assert [outcome.job for outcome in outcomes] == sorted(self.jobs), "a job without an outcome"
        for outcome in outcomes:
            cap = self.one.caps.get(outcome.job)
            held = cap is not None and self.one.policy.elastic and cap.gpus <= outcome.share.gpus
            most = self.one.jobs[outcome.job].gpus.max if held else outcome.wish_gpus
            if outcome.share.gpus < most:
                assert outcome.reason is not None
                assert outcome.reason.code in Code
                assert outcome.reason.sentence
                assert outcome.reason.evidence


def shares_of(scheduler):
    """The share and placement of each job that has GPUs, by the scheduler's own state."""
    view, types = scheduler.view, scheduler.cluster.gpu_types
    return {
        job_id: (
            Share(int(view.gpus[row]), types[view.gpu_type[row]], int(view.servers[row])),
            scheduler.placements.get(job_id, ()),
        )
        for row, job_id in enumerate(view.job_ids.tolist())
        if view.gpus[row]
    }


def expected_verb(before, after, given):
    """The verb of a change of GPUs; whether a job starts or resumes is not decided by its numbers."""
    if after == 0:
        return "pause"
    if before == 0:
        return given if given in ("start", "resume") else "start or resume"
    return "shrink" if after < before else "grow" if after > before else "migrate"


def machine(setting, cluster):
    return type("Safety", (Safety,), {"setting": setting, "cluster": CLUSTERS[cluster]})


def explore(kind, examples, **more):
    run_state_machine_as_test(
        kind,
        settings=settings(
            max_examples=examples,
            stateful_step_count=25,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
            print_blob=False,
            **more,
        ),
    )


@pytest.mark.parametrize("cluster", sorted(CLUSTERS))
@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: " ".join([s[0], *map("=".join, s[1].items())]))
def test_nothing_that_must_not_happen_ever_happens(setting, cluster):
    explore(machine(setting, cluster), 20)


# -- the machine itself can fail -----------------------------------------------------------------------


def fails(name, **options):
    """Whether the machine finds something wrong with a policy on a pool; it need not find the smallest case."""
    try:
        explore(machine((name, options), "pool"), 300, phases=[Phase.generate], report_multiple_bugs=False)
    except AssertionError:
        return True
    return False


@pytest.mark.parametrize("name", policy_names())
def test_a_policy_that_withholds_a_gpu_is_found_out(monkeypatch, name):
    real = make_policy

    def withholds(*args, **more):
        policy = real(*args, **more)
        decide = policy.decide

        def with_less(view, supply, now_s):
            less = replace(supply, gpus_of_type=supply.gpus_of_type - 1, total_gpus=supply.total_gpus - 1)
            return decide(view, less, now_s)

        policy.decide = with_less
        return policy

    monkeypatch.setitem(globals(), "make_policy", withholds)
    assert fails(name)


def test_a_job_that_nothing_is_said_of_is_found_out(monkeypatch):
    outcomes = Scheduler.outcomes
    monkeypatch.setattr(
        Scheduler, "outcomes", lambda self, now_s: [o for o in outcomes(self, now_s) if o.share.gpus]
    )
    assert fails("srtf")


def test_a_policy_that_forgets_its_random_state_is_found_out(monkeypatch):
    monkeypatch.setattr(policy_class("afs-p"), "restore", lambda self, state: None)
    assert fails("afs-p", tie="coin")


def test_a_scheduler_that_takes_gpus_without_a_command_is_found_out(monkeypatch):
    monkeypatch.setattr("shoal.scheduler.scheduler.whole_difference", lambda decided, before, after: decided)
    assert fails("max-min")


@pytest.mark.parametrize("name", policy_names())
def test_a_job_alone_in_a_large_cluster_gets_its_wish(name):
    policy = make_policy(name)
    scheduler = Scheduler(Cluster.pool(64), policy)
    job = Job("alone", 0.0, GpuRange(1, 8), 4, iterations=100.0)
    scheduler.step(0.0, [Submitted(0, job, PROFILES[0])])
    outcome = scheduler.outcome(0, 0.0)
    assert outcome.share.gpus == outcome.wish_gpus
    assert outcome.reason is None


def test_late_messages_about_jobs_that_have_ended_change_nothing():
    scheduler = Scheduler(Cluster.pool(4), make_policy("max-min"))
    scheduler.step(0.0, [Submitted(0, Job("a", 0.0, GpuRange(1, 4), 1, iterations=9.0), PROFILES[0])])
    scheduler.step(1.0, [Finished(0)])
    plan = scheduler.step(
        2.0,
        [
            Finished(0), Cancelled(0), Held(0, True), Rescaled(0, 1, 2), Measured(0, PROFILES[1]),
            Capped(0, 1, "late"),
        ],
    )  # fmt: skip
    assert plan.commands == ()
    assert not list(scheduler.outcomes(2.0))
    assert not scheduler.jobs
    assert not scheduler.profiles


def test_profiles_that_nobody_has_any_more_are_forgotten_and_decisions_stay_the_same(monkeypatch):
    few, all_ = (Scheduler(Cluster.pool(8), make_policy("afs-l")) for _ in range(2))
    rng, plans = np.random.default_rng(5), {few: [], all_: []}
    events = [
        Submitted(i, Job(f"j{i}", 0.0, GpuRange(1, 8), 1, iterations=100.0), PROFILES[i % 2])
        for i in range(5)
    ]
    for step in range(200):
        speed = {n: 1.0 / n ** rng.uniform(0.1, 0.9) for n in range(1, 9)}
        events.append(Measured(int(rng.integers(5)), Profile.of(f"m{step}", speed)))
        for scheduler, kept in ((few, 20), (all_, 10**6)):
            monkeypatch.setattr("shoal.scheduler.scheduler._FEW_PROFILES", kept)
            plans[scheduler].append(scheduler.step(float(step), events).commands)
        events = []
    assert plans[few] == plans[all_]
    assert few.view.profiles_known <= 20 + 4 * 5 + 1
    assert all_.view.profiles_known > 200
