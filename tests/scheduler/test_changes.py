"""What a decision changes in the view, against the rule in plain Python."""

from __future__ import annotations

import math

import numpy as np
import pytest

from shoal.core.cluster import Cluster
from shoal.core.events import Held, NodeLost, Rescaled, Submitted, Timer
from shoal.core.job import GpuRange, Job, Kind
from shoal.core.plan import NO_SHARE, VERBS, Cause, CauseKind
from shoal.core.profile import Profile
from shoal.core.view import View
from shoal.core.view_kernels import FLOATS, INTS
from shoal.placement.registry import Setting, make_placer
from shoal.policies.registry import make_policy
from shoal.scheduler.scheduler import Scheduler

TYPES = ("k80", "v100")
PROFILES = [
    Profile.of(f"m{i}", {n: 1 / n**power for n in range(1, 9)}) for i, power in enumerate((0.5, 0.8, 1.0))
]


def random_view(rng, types):
    """Some twenty jobs: some wait, some have run before, some have a share; ids with gaps, as jobs have left."""
    view = View(types, 64)
    for job_id in np.flatnonzero(rng.random(30) < 0.7).tolist():
        kind = Kind.PARAMETER_SERVER if rng.random() < 0.3 else Kind.ALL_REDUCE
        job = Job(f"j{job_id}", 0.0, GpuRange(1, 8), 4, iterations=float(rng.uniform(1, 1e4)), kind=kind)
        row = view.add(job_id, job, PROFILES[job_id % 3], 0, 0.0)
        if rng.random() < 0.7:  # it has run before
            view.first_start_s[row] = view.last_start_s[row] = rng.uniform(0, 50)
            view.generation[row] = rng.integers(1, 9)
            view.changed_s[row], view.settled_s[row] = rng.uniform(50, 120, 2)
            view.attained_gpu_s[row] = rng.uniform(0, 500)
            if rng.random() < 0.7:
                view.gpus[row], view.gpu_type[row] = rng.integers(1, 9), rng.integers(len(types))
                view.servers[row] = rng.integers(1, 4) if kind is Kind.PARAMETER_SERVER else 0
                view.rate[row] = rng.uniform(0, 3)
    return view


def by_the_rule(view, gpus, types, servers, moved, now_s):
    """(what changes, by verb; the rows afterwards), as sentences of the design have it."""
    rows = [view.dump(row) for row in range(len(view))]
    changes = []
    for row, had in enumerate(rows):
        share = int(gpus[row])
        kind = -1 if share == 0 else 0 if types is None else int(types[row])
        ps = share * had["is_ps"] if servers is None else int(servers[row])
        same = share == had["gpus"] and not moved[row]
        if same and (types is None or kind == had["gpu_type"]) and (servers is None or ps == had["servers"]):
            continue
        begun = had["first_start_s"] is not None and had["first_start_s"] <= now_s
        if share == 0:
            verb = "pause"
        elif had["gpus"] == 0:
            verb = "resume" if begun else "start"
        else:
            verb = "shrink" if share < had["gpus"] else "grow" if share > had["gpus"] else "migrate"
        if verb in ("start", "resume"):
            had["last_start_s"] = now_s
            had["first_start_s"] = had["first_start_s"] if begun else now_s
        had["attained_gpu_s"] += had["gpus"] * (now_s - had["changed_s"])
        had["changed_s"], had["generation"] = now_s, had["generation"] + 1
        releases = share < had["gpus"]
        had["gpus"], had["gpu_type"], had["servers"] = share, kind, ps
        line = [row, view.job_at(row), share, kind, ps, had["generation"], VERBS.index(verb)]
        changes.append((not releases, row, line))
    return [line for *_, line in sorted(changes)], rows


@pytest.mark.parametrize("types", [("gpu",), TYPES], ids=["one type", "two types"])
@pytest.mark.parametrize(
    "own_servers", [False, True], ids=["as many servers as GPUs", "servers of their own"]
)
@pytest.mark.parametrize("some_move", [False, True], ids=["all stay", "some move"])
def test_what_changes_is_what_differs_releases_first(types, own_servers, some_move):
    verbs = set()
    for seed in range(150):
        rng = np.random.default_rng(seed)
        view = random_view(rng, types)
        n = len(view)
        gpus = np.where(rng.random(n) < 0.5, view.gpus, rng.integers(0, 9, n)).astype(np.int32)
        kinds = np.where(rng.random(n) < 0.5, view.gpu_type, rng.integers(0, len(types), n)).astype(np.int32)
        kinds = None if len(types) == 1 else np.where(gpus == 0, -1, np.maximum(kinds, 0)).astype(np.int32)
        servers = None
        if own_servers:
            other = np.where(rng.random(n) < 0.5, view.servers, rng.integers(1, 4, n))
            servers = np.where((gpus > 0) & (view.is_ps > 0), other, 0).astype(np.int32)
        moved = (rng.random(n) < 0.2) & (gpus > 0) if some_move else np.zeros(n, bool)
        want, after = by_the_rule(view, gpus, kinds, servers, moved, 130.0)
        got = view.set_shares(gpus, kinds, servers, moved.copy() if some_move else None, 130.0)
        assert got.tolist() == want, f"seed {seed}"
        assert [view.dump(row) for row in range(n)] == after, f"seed {seed}"
        verbs |= {VERBS[line[-1]] for line in want}
    assert verbs >= {"pause", "shrink", "grow", "start", "resume"}
    assert "migrate" in verbs or not (some_move or own_servers or len(types) > 1)


def test_who_goes_on_runs_at_the_speed_of_its_curve_and_is_through_when_its_work_is():
    for seed in range(100):
        rng = np.random.default_rng(seed)
        view = random_view(rng, TYPES)
        n = len(view)
        gpus = rng.integers(0, 9, n).astype(np.int32)
        kinds = np.where(gpus == 0, -1, rng.integers(0, 2, n)).astype(np.int32)
        left = view.remaining_now(130.0)
        changes = view.set_shares(gpus, kinds, None, None, 130.0)
        ends_s = view.go_on(changes, 130.0)
        for (row, job, share, *_), end_s in zip(changes.tolist(), ends_s.tolist()):
            rate = PROFILES[job % 3].speed("k80", share) if share else 0.0
            assert view.remaining[row] == left[row]
            assert (view.rate[row], view.settled_s[row]) == (rate, 130.0)
            assert end_s == (130.0 + left[row] / rate if share else math.inf), f"seed {seed}"


def test_a_job_that_leaves_is_closed_up_over_and_one_that_comes_finds_a_clean_row():
    rng = np.random.default_rng(3)
    view = random_view(rng, TYPES)

    def limits_at(row):
        return view.speed_at[:, row].tolist() + view.type_max[:, row].tolist()

    rows = {view.job_at(row): view.dump(row) for row in range(len(view))}
    limits = {view.job_at(row): limits_at(row) for row in range(len(view))}
    for job_id in rng.permutation(list(rows)).tolist():
        view.remove(job_id)
        del rows[job_id]
        assert view.job_ids.tolist() == list(rows)
        assert [view.dump(row) for row in range(len(view))] == list(rows.values())
        assert [limits_at(row) for row in range(len(view))] == [limits[job] for job in rows]
    job = Job("new", 5.0, GpuRange(2, 6), 3, weight=2.0, iterations=70.0)
    row = view.add(99, job, PROFILES[0], 1, 8.0)
    clean = dict.fromkeys(FLOATS, 0.0) | dict.fromkeys(INTS, 0)
    clean |= {
        "submit_s": 5.0,
        "weight": 2.0,
        "total": 70.0,
        "remaining": 70.0,
        "settled_s": 8.0,
        "changed_s": 8.0,
    }
    clean |= {"first_start_s": None, "last_start_s": None, "gpu_type": -1}
    clean |= {"user": 1, "min_gpus": 2, "max_gpus": 6, "requested_gpus": 3, "step_gpus": 1}
    assert view.dump(row) == clean


@pytest.mark.parametrize("policy", ["fifo", "afs-l", "max-min"])
@pytest.mark.parametrize(("least", "most"), [(1, 2), (4, 6)])
def test_a_job_that_is_rescaled_while_it_is_held_goes_on_within_its_new_range(policy, least, most):
    scheduler = Scheduler(Cluster.pool(8), make_policy(policy))
    jobs = [
        Job("a", 0.0, GpuRange(3, 8), 3, iterations=100.0),
        Job("b", 0.0, GpuRange(4, 4), 4, iterations=100.0),
    ]
    scheduler.step(0.0, [Submitted(0, jobs[0], PROFILES[1])])
    scheduler.step(1.0, [Held(0, True)])
    scheduler.step(2.0, [Rescaled(0, least, most)])
    plan = scheduler.step(3.0, [Held(0, False), Submitted(1, jobs[1], PROFILES[1])])
    assert {c.job: c.share.gpus for c in plan.commands}[0] in range(least, most + 1)


@pytest.mark.parametrize(
    ("policy", "size", "verb"),
    [("max-min", (1, 8), "shrink"), ("max-min", (4, 4), "migrate"), ("fifo", (4, 4), "migrate"),
     ("max-min", (6, 8), "pause"), ("fifo", (8, 8), "pause")],
)  # fmt: skip
def test_a_job_that_loses_a_node_gets_a_command_that_names_the_node(policy, size, verb):
    cluster = Cluster.of(2, 4)
    made = make_policy(policy)
    placer = make_placer("auto", Setting(cluster, made.elastic, dict, move_s=1.0))
    scheduler = Scheduler(cluster, made, placer)
    least, most = size
    job = Job("a", 0.0, GpuRange(least, most), most, iterations=100.0)
    scheduler.step(0.0, [Submitted(0, job, PROFILES[1])])
    node = scheduler.placements[0][0][0]
    plan = scheduler.step(1.0, [Timer(), NodeLost(node)])
    (command,) = plan.commands
    assert (command.verb, command.cause) == (verb, Cause(CauseKind.NODE_LOST, 2, node))
    assert command.placement == (() if verb == "pause" else ((1 - node, 4),))


def test_a_job_that_is_held_gets_a_command_to_pause_and_the_others_what_it_had():
    scheduler = Scheduler(Cluster.pool(8), make_policy("fifo"))
    jobs = [Job(name, 0.0, GpuRange(6, 6), 6, iterations=100.0) for name in "ab"]
    scheduler.step(0.0, [Submitted(i, job, PROFILES[1]) for i, job in enumerate(jobs)])
    pause, start = scheduler.step(1.0, [Held(0, True)]).commands
    assert (pause.job, pause.verb, pause.share, pause.cause) == (
        0, "pause", NO_SHARE, Cause(CauseKind.HELD, 2)
    )  # fmt: skip
    assert (start.job, start.verb, start.cause) == (1, "start", Cause())


def test_a_job_that_is_held_and_released_at_once_keeps_its_share_without_a_command():
    scheduler = Scheduler(Cluster.pool(8), make_policy("fifo"))
    scheduler.step(0.0, [Submitted(0, Job("a", 0.0, GpuRange(6, 6), 6, iterations=100.0), PROFILES[1])])
    assert scheduler.step(1.0, [Held(0, True), Held(0, False)]).commands == ()
    assert scheduler.view.gpus.tolist() == [6]


def test_an_event_that_is_taken_in_before_the_step_is_in_its_plan():
    scheduler = Scheduler(Cluster.pool(8), make_policy("fifo"))
    scheduler.step(0.0, [Submitted(0, Job("a", 0.0, GpuRange(6, 6), 6, iterations=100.0), PROFILES[1])])
    scheduler.take_in(Held(0, True), 1.0)
    plan = scheduler.step(2.0, [Timer()])
    assert [(c.job, c.verb) for c in plan.commands] == [(0, "pause")]
    assert plan.causes == range(1, 3)
