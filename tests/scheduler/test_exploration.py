"""Trials: when they begin and end, what they never do, and jobs that do not behave."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest

from shoal.core.cluster import Cluster, Node, User
from shoal.core.events import Capped, Event, Finished, Held, Measured, Submitted, Timer, WorkerFailed
from shoal.core.job import GpuRange, Job
from shoal.core.limits import Limits
from shoal.core.plan import CauseKind, Plan
from shoal.core.profile import ANY_TYPE, Profile, SpeedCurve
from shoal.core.reason import Code
from shoal.knowledge.plain_speed import plain_speed
from shoal.knowledge.speed_estimator import SpeedEstimator
from shoal.knowledge.speed_prior import assumed_speed
from shoal.knowledge.unknown import Unknown
from shoal.policies.registry import make_policy
from shoal.scheduler.exploration.exploration import Exploration
from shoal.scheduler.exploration.history import AGAIN_S
from shoal.scheduler.exploration.trial import Member
from shoal.scheduler.saved import restore, save
from shoal.scheduler.scheduler import Scheduler

Curve = Callable[[int], float]
#: Measurements of each running job between two decisions, and the time that they take.
SAMPLES, TURN_S = 5, 2.0


class Lab:
    """Jobs with true speeds, measured every turn at the sizes they have, and a scheduler that explores."""

    def __init__(
        self, policy: str = "optimus", cluster: Cluster | None = None, cool_down_s: float = 5.0
    ) -> None:
        self.cluster = cluster or Cluster.pool(4, "v")
        self.scheduler = Scheduler(
            self.cluster, make_policy(policy, {}), cool_down_s=cool_down_s, exploration=Exploration()
        )
        self.now_s = 0.0
        self.curves: dict[int, Curve] = {}
        #: By model.
        self.speeds: dict[str, SpeedEstimator] = {}
        #: Jobs that report nothing.
        self.silent: set[int] = set()
        self.plans: list[Plan] = []
        self._wake_s = np.inf

    @property
    def exploration(self) -> Exploration:
        assert self.scheduler.exploration is not None
        return self.scheduler.exploration

    def submit(
        self, curve: Curve, low: int = 1, high: int = 4, model: str = "", user: str = "ada", step: int = 1
    ) -> int:
        """A job of a million steps; `curve` is its true speed by GPUs."""
        job_id = len(self.curves) + 1
        self.curves[job_id] = curve
        job = Job(
            f"j{job_id}",
            self.now_s,
            GpuRange(low, high, step),
            low,
            model=model or f"m{job_id}",
            user=user,
            iterations=1e6,
        )
        self.step(Submitted(job_id, job, self.profile(job)))
        return job_id

    def profile(self, job: Job) -> Profile:
        speeds = self.speeds.setdefault(job.model, SpeedEstimator(self.cluster.total_gpus, 8))
        curves, uncertain = {}, {}
        for gpu_type in speeds.gpu_types():
            table, known = speeds.table(gpu_type), speeds.uncertainty(gpu_type)
            assert not isinstance(table, Unknown)
            assert not isinstance(known, Unknown)
            curves[gpu_type] = {0: SpeedCurve(plain_speed(table.iterations_per_s, job.gpus.min))}
            uncertain[gpu_type] = known
        first = next(iter(curves.values()), {0: SpeedCurve(assumed_speed(self.cluster.total_gpus))})
        return Profile(job.model, {ANY_TYPE: first, **curves}, uncertain=uncertain)

    def step(self, *events: Event) -> Plan:
        plan = self.scheduler.step(self.now_s, list(events))
        self.plans.append(plan)
        self._wake_s = plan.wake_s
        return plan

    def turn(self) -> None:
        """Jobs train for a while and are measured; then the scheduler decides, as a server does."""
        self.now_s += TURN_S
        view = self.scheduler.view
        for job_id, gpus, t in zip(view.job_ids.tolist(), view.gpus.tolist(), view.gpu_type.tolist()):
            speed = self.curves[job_id](gpus) if gpus else 0.0
            self.scheduler.observe(job_id, 1e6, speed, self.now_s)
            if gpus and job_id not in self.silent:
                estimator = self.speeds[self.scheduler.jobs[job_id].model]
                if estimator.samples(gpus, view.gpu_types[t]) >= SAMPLES and not self.exploration.trials:
                    estimator.observe(gpus, 1, view.gpu_types[t], 1.0 / speed)
                    continue
                for _ in range(SAMPLES):
                    estimator.observe(gpus, 1, view.gpu_types[t], 1.0 / speed)
        events: list[Event] = [
            Measured(job_id, self.profile(job))
            for job_id, job in self.scheduler.jobs.items()
            if self.scheduler.profiles[job_id].uncertain.keys() or self.speeds[job.model].gpu_types()
        ]
        if self._wake_s <= self.now_s:
            events.append(Timer())
        if events:
            self.step(*events)

    def turns(self, count: int) -> None:
        for _ in range(count):
            self.turn()

    def until(self, what: Callable[[], bool], most: int = 200) -> None:
        for _ in range(most):
            if what():
                return
            self.turn()
        raise AssertionError(f"it did not come to pass: {self.gpus()}, {self.exploration}")

    def gpus(self) -> dict[int, int]:
        view = self.scheduler.view
        return dict(zip(view.job_ids.tolist(), view.gpus.tolist()))

    def notes(self) -> list[str]:
        return [note.sentence for plan in self.plans for note in plan.trials]


def perfect(gpus: int) -> float:
    return 10.0 * gpus


def flat(gpus: int) -> float:
    return 10.0


@pytest.mark.parametrize("policy", ["optimus", "afs-p", "fair-afs"])
def test_a_trial_says_what_it_does_and_ends_when_its_jobs_were_measured(policy: str) -> None:
    lab = Lab(policy)
    a, b = lab.submit(perfect), lab.submit(flat)
    lab.until(lambda: bool(lab.exploration.trials))
    trial = lab.exploration.trials[0]
    member = next(m for m in trial.members if m.is_measured)
    outcome = lab.scheduler.outcome(member.job_id, lab.now_s)
    assert outcome.reason is not None
    assert outcome.reason.code is Code.MEASURING
    assert f"for {trial.steps} steps: the next decision depends on it" in outcome.reason.sentence
    command = next(c for c in lab.plans[-1].commands if c.job == member.job_id)
    assert command.cause.kind is CauseKind.MEASURING
    lab.until(lambda: not lab.exploration.trials)
    lab.until(lambda: lab.gpus() == {a: 3, b: 1})
    lab.turns(50)
    assert lab.gpus() == {a: 3, b: 1}
    assert any("ended: measured" in note for note in lab.notes())


def test_a_trial_respects_the_cool_down() -> None:
    lab = Lab(cool_down_s=60.0)
    lab.submit(perfect)
    lab.submit(flat)
    began_s = lab.now_s
    lab.until(lambda: bool(lab.exploration.trials))
    assert lab.now_s >= began_s + 60.0


def test_a_waiting_job_ends_a_trial_and_keeps_others_from_beginning() -> None:
    lab = Lab("afs-p")
    lab.submit(perfect, 2, 4)
    lab.submit(flat, 1, 2)
    lab.until(lambda: bool(lab.exploration.trials))
    lab.submit(perfect, 2, 4)  # at most one of the large ones can run besides
    lab.submit(perfect, 2, 4)
    assert 0 in lab.gpus().values()
    assert not lab.exploration.trials
    lab.turns(30)
    assert not lab.exploration.trials


def test_without_budget_nothing_is_measured() -> None:
    lab = Lab()
    lab.exploration.budget.share = 0.0
    lab.submit(perfect)
    lab.submit(flat)
    lab.turns(100)
    assert lab.exploration.began == 0
    assert set(lab.gpus().values()) == {2}


def test_known_curves_are_not_measured_again_and_drift_starts_it_anew() -> None:
    lab = Lab()
    lab.submit(perfect)
    b = lab.submit(flat)
    lab.until(lambda: lab.gpus() == {1: 3, b: 1})
    lab.turns(100)
    began = lab.exploration.began
    lab.turns(200)
    assert lab.exploration.began == began, "all that matters is known"
    lab.curves[1], lab.curves[b] = (lambda gpus: 1.0), (lambda gpus: 10.0 * gpus)
    lab.until(lambda: lab.exploration.began > began, most=400)
    lab.until(lambda: lab.gpus() == {1: 1, b: 3}, most=600)


def test_jobs_of_one_model_share_what_was_learned() -> None:
    lab = Lab(cluster=Cluster.pool(8, "v"))
    for _ in range(2):
        lab.submit(flat, model="same")
    lab.submit(perfect, high=8)
    lab.until(lambda: sorted(lab.gpus().values()) == [1, 1, 6])
    assert all(tried.times == 1 for tried in lab.exploration.history.tried.values())


def test_other_gpu_types_are_tried_once_per_model_and_user() -> None:
    cluster = Cluster((Node("old", 2, "k80"), Node("new", 2, "v100")), (User("ada"),))
    lab = Lab("optimus", cluster)
    speed = {"k80": 1.0, "v100": 5.0}

    def type_of(job_id: int) -> str:
        view = lab.scheduler.view
        return view.gpu_types[view.gpu_type[view.row(job_id)]]

    a = lab.submit(lambda gpus: 10.0 * gpus * speed[type_of(1)], high=2, model="same")
    assert type_of(a) == "k80", "the first of types that are assumed to be equal"
    lab.turns(60)
    visits = [note for plan in lab.plans for note in plan.trials if note.began and "of v100" in note.sentence]
    assert len(visits) == 1
    assert type_of(a) == "v100", "the faster type, once it is known"
    lab.step(Finished(a))
    b = lab.submit(lambda gpus: 10.0 * gpus * speed[type_of(2)], high=2, model="same")
    began = lab.exploration.began
    lab.turns(60)
    assert lab.exploration.began == began, "its model was tried on both types"
    assert type_of(b) == "v100"


def test_each_user_tries_a_type_that_no_measurement_came_from_once() -> None:
    """The new node gives no measurements, so the model stays unknown there: one visit for ada, and one for bob."""
    cluster = Cluster((Node("old", 4, "k80"), Node("new", 4, "v100")), (User("ada"), User("bob")))
    lab = Lab("optimus", cluster)

    def speed(gpus: int) -> float:
        view = lab.scheduler.view
        lab.silent = {
            job
            for job, t in zip(view.job_ids.tolist(), view.gpu_type.tolist())
            if view.gpu_types[t] == "v100"
        }
        return 10.0 * gpus

    a = lab.submit(speed, 2, 2, model="same", user="ada")
    lab.turns(200)

    def visits(job_id: int) -> int:
        notes = [note for plan in lab.plans for note in plan.trials if note.began and note.job_id == job_id]
        return sum("of v100" in note.sentence for note in notes)

    assert visits(a) == 1
    b = lab.submit(speed, 2, 2, model="same", user="bob")
    again = lab.submit(speed, 2, 2, model="same", user="ada")
    lab.turns(400)
    assert (visits(a), visits(b), visits(again)) == (1, 1, 0)


def test_trials_keep_to_the_multiples_of_a_job_with_a_step() -> None:
    lab = Lab(cluster=Cluster.pool(8, "v"))
    a, b = lab.submit(perfect, 2, 8, step=2), lab.submit(flat, 2, 8, step=2)
    for _ in range(100):
        lab.turn()
        assert all(gpus % 2 == 0 for gpus in lab.gpus().values())
    assert lab.gpus() == {a: 6, b: 2}


def test_trials_stay_within_the_limits_of_users() -> None:
    users = (User("ada", limits=Limits(max_gpus=2)), User("bob"))
    lab = Lab("optimus", Cluster((Node("n", 4, "v"),), users))
    lab.submit(perfect, user="ada")
    lab.submit(flat, user="bob")
    for _ in range(200):
        lab.turn()
        assert lab.gpus()[1] <= 2


@pytest.mark.parametrize("cap", [1, 2])
def test_trials_stay_within_the_cap_of_the_autoscaler_and_of_idle_jobs(cap: int) -> None:
    lab = Lab("afs-p")
    a = lab.submit(perfect)
    lab.submit(flat)
    lab.turns(2)
    lab.step(Capped(a, cap, "it is idle"))
    for _ in range(200):
        lab.turn()
        assert lab.gpus()[a] <= cap


def test_a_cap_ends_a_trial_above_it() -> None:
    lab = Lab()
    lab.submit(perfect)
    lab.submit(flat)
    lab.until(lambda: bool(lab.exploration.trials))
    grows = next(m for t in lab.exploration.trials for m in t.members if m.gpus > m.before_gpus)
    lab.step(Capped(grows.job_id, grows.gpus - 1, "it is idle"))
    assert lab.gpus()[grows.job_id] < grows.gpus


def test_a_trial_that_no_budget_could_pay_does_not_keep_others_from_beginning() -> None:
    lab = Lab(cluster=Cluster.pool(6, "v"))
    # Steps of 200 s: a trial would take more GPU time than is saved up in an hour.
    slow = lab.submit(lambda gpus: 0.005, 1, 2, model="slow")
    a, b = lab.submit(perfect), lab.submit(flat)
    lab.until(lambda: (lab.gpus()[a], lab.gpus()[b]) == (3, 1), most=300)
    assert lab.gpus()[slow] == 2
    assert all(subject.model != "slow" for subject in lab.exploration.history.tried)


def again(lab: Lab, policy: str, cluster: Cluster | None = None) -> Exploration:
    """Save the scheduler and restore it with this policy and cluster."""
    saved = json.loads(json.dumps(save(lab.scheduler), default=lambda value: value.tolist()))
    exploration = Exploration()
    lab.scheduler = restore(
        saved, cluster or lab.cluster, make_policy(policy, {}), lab.scheduler.jobs, lab.scheduler.profiles,
        cool_down_s=5.0, exploration=exploration,
    )  # fmt: skip
    return exploration


def test_trials_end_when_a_policy_that_does_not_decide_by_speed_takes_over() -> None:
    lab = Lab()
    a, b = lab.submit(perfect), lab.submit(flat)
    lab.until(lambda: bool(lab.exploration.trials))
    exploration = again(lab, "max-min")
    plan = lab.step(Timer())
    assert not exploration.trials
    assert all(command.cause.kind is CauseKind.DECIDED for command in plan.commands)
    assert any("ended: policy max-min does not decide by speed" in note for note in lab.notes())
    assert lab.gpus() == {a: 2, b: 2}
    reasons = [lab.scheduler.outcome(job, lab.now_s).reason for job in (a, b)]
    assert all(reason is None or reason.code is not Code.MEASURING for reason in reasons)


@pytest.mark.parametrize(
    "nodes",
    [
        (Node("old", 2, "k80"),),
        (Node("first", 1, "a100"), Node("old", 2, "k80"), Node("new", 2, "v100")),
    ],
)
def test_a_trial_on_another_type_survives_a_change_of_the_types_or_ends(nodes: tuple[Node, ...]) -> None:
    cluster = Cluster((Node("old", 2, "k80"), Node("new", 2, "v100")), (User("ada"),))
    lab = Lab("optimus", cluster)
    a = lab.submit(perfect, high=2)
    lab.until(lambda: bool(lab.exploration.trials))
    assert lab.exploration.trials[0].members[0].gpu_type == 1
    exploration = again(lab, "optimus", Cluster(nodes, (User("ada"),)))
    lab.step(Timer())
    view = lab.scheduler.view
    if len(nodes) == 1:
        assert not exploration.trials
        assert any("ended: the cluster no longer has its GPUs" in note for note in lab.notes())
        assert lab.gpus() == {a: 2}
    else:
        assert view.gpu_types[exploration.trials[0].members[0].gpu_type] == "v100"
        assert view.gpu_types[view.gpu_type[view.row(a)]] == "v100"


def test_a_saved_trial_goes_on_after_a_restart() -> None:
    lab = Lab()
    lab.submit(perfect)
    lab.submit(flat)
    lab.until(lambda: bool(lab.exploration.trials))
    saved = json.loads(json.dumps(save(lab.scheduler), default=lambda value: value.tolist()))
    again = Exploration()
    scheduler = restore(
        saved, lab.cluster, make_policy("optimus", {}), lab.scheduler.jobs, lab.scheduler.profiles,
        cool_down_s=5.0, exploration=again,
    )  # fmt: skip
    assert again.trials == lab.exploration.trials
    assert again.history == lab.exploration.history
    assert again.budget == lab.exploration.budget
    plan = scheduler.step(lab.now_s, [Timer()])
    assert not len(plan.changes), "the trial goes on"
    lab.scheduler = scheduler
    lab.until(lambda: lab.gpus() == {1: 3, 2: 1})


# -- jobs that do not behave ---------------------------------------------------------------------------


def test_a_job_that_is_slower_with_every_gpu_ends_with_its_minimum() -> None:
    lab = Lab()
    a, b = lab.submit(lambda gpus: 10.0 / gpus), lab.submit(perfect)
    lab.until(lambda: lab.gpus() == {a: 1, b: 3})
    lab.turns(50)
    assert lab.gpus() == {a: 1, b: 3}


def test_a_job_that_reports_no_speed_is_left_alone_and_the_others_are_decided_on() -> None:
    lab = Lab()
    a, b = lab.submit(perfect), lab.submit(flat)
    lab.silent.add(b)
    lab.turns(200)
    assert lab.exploration.began == 0, "nothing could be measured by exchanging GPUs with it"
    assert lab.gpus()[a] + lab.gpus()[b] == 4


def test_a_speed_that_keeps_changing_is_not_measured_for_ever() -> None:
    lab = Lab()
    lab.submit(perfect)
    b = lab.submit(flat)
    rng = np.random.default_rng(0)
    factor = [1.0]
    lab.curves[b] = lambda gpus: 10.0 * factor[0]
    for turn in range(1500):
        if turn % 20 == 0:
            factor[0] = float(rng.choice([0.1, 1.0, 10.0]))
        lab.turn()
    times = [tried.times for tried in lab.exploration.history.tried.values()]
    # After each trial of the same thing the next one waits four times as long.
    assert max(times) <= 2 + int(np.log(1500 * TURN_S / AGAIN_S) / np.log(4.0))
    assert lab.exploration.budget.spent_gpu_s <= 0.02 * 4 * (3600.0 + lab.now_s)


def test_a_job_that_ends_before_it_was_measured_ends_its_trial() -> None:
    lab = Lab()
    a, b = lab.submit(perfect), lab.submit(flat)
    lab.until(lambda: bool(lab.exploration.trials))
    lab.step(Finished(b))
    assert not lab.exploration.trials
    assert lab.gpus() == {a: 4}
    assert any("a job of it left" in note for note in lab.notes())


def measured_members(lab: Lab, job_id: int) -> list[Member]:
    return [m for t in lab.exploration.trials for m in t.members if m.job_id == job_id and m.is_measured]


def test_a_size_at_which_a_worker_fails_is_tried_ever_more_rarely_and_why_says_so() -> None:
    """The job restarts after each failure, as a job with max_restarts does."""
    lab = Lab()
    lab.submit(perfect, model="sound")
    b = lab.submit(flat, model="fails")
    failures = 0
    for _ in range(600):
        lab.turn()
        if measured_members(lab, b):
            failures += 1
            lab.step(WorkerFailed(b), Held(b, True))
            lab.now_s += TURN_S
            lab.step(Held(b, False))
    tried = {s: t for s, t in lab.exploration.history.tried.items() if s.model == "fails"}
    assert failures == sum(t.times for t in tried.values())
    assert all(t.failed for t in tried.values())
    # After each trial of the same thing the next one waits four times as long.
    most = 1 + int(np.log(1 + 3 * lab.now_s / AGAIN_S) / np.log(4.0))
    assert 1 <= max(t.times for t in tried.values()) <= most
    assert any("ended: a worker of job 2 failed at" in note for note in lab.notes())
    reason = lab.scheduler.outcome(b, lab.now_s).reason
    assert reason is not None
    assert "workers failed when it was measured at" in reason.sentence
    assert reason.evidence["failed_gpus"]


def test_a_job_that_fails_for_another_reason_blames_no_size() -> None:
    lab = Lab()
    lab.submit(perfect)
    b = lab.submit(flat)
    lab.until(lambda: bool(measured_members(lab, b)))
    lab.step(Finished(b, succeeded=False))  # as at its time limit
    assert not lab.exploration.trials
    assert not any(tried.failed for tried in lab.exploration.history.tried.values())


def test_a_failure_of_a_job_that_only_gives_its_gpus_blames_no_size() -> None:
    lab = Lab()
    a, b = lab.submit(perfect), lab.submit(flat)
    lab.until(lambda: bool(lab.exploration.trials))
    trial = lab.exploration.trials[0]
    other = next((m for m in trial.members if not m.is_measured), None)
    if other is None:  # both were to be measured: the one that did not fail is not blamed
        other = trial.members[0]
    subjects = [m.subject for m in trial.members if m.job_id != other.job_id and m.subject is not None]
    lab.step(WorkerFailed(other.job_id))
    assert lab.exploration.trial_of(a) is lab.exploration.trial_of(b) is None
    history = lab.exploration.history.tried
    assert subjects
    assert all(history[s].times == 1 and not history[s].failed for s in subjects)


def test_a_size_that_gives_no_measurement_is_given_up_and_tried_ever_more_rarely() -> None:
    lab = Lab()
    lab.submit(perfect)
    b = lab.submit(flat)
    lab.until(lambda: bool(lab.exploration.trials))
    lab.silent |= {1, b}
    lab.until(lambda: not lab.exploration.trials)
    assert any("no measurement came in time" in note for note in lab.notes())
    lab.turns(1000)
    assert all(tried.times <= 4 for tried in lab.exploration.history.tried.values())
