"""Limits, priorities, dependencies and time limits in simulations, from files to figures."""

from __future__ import annotations

import json
from bisect import bisect_right

import numpy as np
import pytest
from click.testing import CliRunner

from shoal.cli.commands import cli
from shoal.core.cluster import Cluster, Group, User
from shoal.core.errors import InputError
from shoal.core.job import After, GpuRange, Job, When
from shoal.core.limits import WEEK_S, Limits
from shoal.core.profile import Profile
from shoal.policies.registry import make_policy, policy_names
from shoal.sim.costs import KINDS, Costs
from shoal.sim.engine import Simulation
from shoal.sim.inputs.cluster_file import read_cluster
from shoal.sim.inputs.jobs_file import read_jobs

PROFILES = {"good": Profile.of("good", {n: 1.0 / n**0.8 for n in range(1, 9)})}


def simulate(jobs, cluster, policy="fair-afs", cost="none", **rest):
    simulation = Simulation(jobs, PROFILES, cluster, make_policy(policy), costs=Costs(cost), **rest)
    return simulation.run()


def history(record):
    """(time, {job: GPUs}) after each time at which shares change."""
    gpus, at = {}, {}
    for time_s, job, count in zip(record.change_s, record.change_job, record.change_gpus):
        gpus[job] = count
        at[time_s] = dict(gpus)
    return at


def random_jobs(rng, count):
    jobs, now = [], 0.0
    for i in range(count):
        now += float(rng.exponential(400.0))
        low = int(rng.integers(1, 4))
        high = int(rng.integers(low, 9))
        after = ()
        if i and rng.random() < 0.2:
            after = (After(int(rng.integers(0, i)), When(str(rng.choice(["success", "failure", "any"])))),)
        jobs.append(
            Job(
                f"j{i}", now, GpuRange(low, high), high, str(rng.choice(["ada", "ben", "cyd"])), "good",
                float(rng.uniform(100, 20000)), priority=int(rng.integers(0, 3)), after=after,
                time_limit_s=float(rng.uniform(500, 5000)) if rng.random() < 0.3 else None,
            )
        )  # fmt: skip
    return jobs


RUNS = [(name, "none") for name in policy_names()] + [
    (name, cost) for name in ("fair-afs", "gandiva-fair", "fifo") for cost in KINDS if cost != "none"
]


@pytest.mark.parametrize(("policy", "cost"), RUNS)
def test_no_limit_is_exceeded_at_any_moment_of_a_simulation(policy, cost):
    rng = np.random.default_rng(5)
    jobs = random_jobs(rng, 60)
    users = (
        User("ada", 1, Limits(max_gpus=5, max_running_jobs=2), "lab"),
        User("ben", 2, Limits(gpu_hours_per_week=6.0), "lab"),
        User("cyd"),
    )
    cluster = Cluster.pool(12, users=users)
    cluster = Cluster(cluster.nodes, users, pooled=True, groups=(Group("lab", 2.0, Limits(max_gpus=8)),))
    record = simulate(jobs, cluster, policy, cost)
    used_s, last_s, moments = 0.0, 0.0, history(record)
    times = list(moments)
    for time_s, gpus in moments.items():
        assert used_s <= 6 * 3600.0 + 1e-3
        by_user = {
            name: [g for i, g in gpus.items() if g and jobs[i].user == name] for name in ("ada", "ben", "cyd")
        }
        if time_s // WEEK_S != last_s // WEEK_S:
            used_s = 0.0
        assert sum(by_user["ada"]) <= 5
        assert len(by_user["ada"]) <= 2
        assert sum(by_user["ada"]) + sum(by_user["ben"]) <= 8
        last_s, next_week_s = time_s, (time_s // WEEK_S + 1) * WEEK_S
        until_s = min(times[bisect_right(times, time_s) :][:1] or [time_s])
        used_s += sum(by_user["ben"]) * (min(until_s, next_week_s) - time_s)
    finish, start = record.finish_s, record.first_start_s
    for i, job in enumerate(jobs):
        for after in job.after:
            if np.isfinite(start[i]):
                assert start[i] >= finish[after.job_id]
        ran_s = finish[i] - job.submit_s - record.wait_s[i]
        assert not ran_s > (job.time_limit_s or np.inf) + 1e-6
    assert record.extra["time_limits_reached"] > 0
    assert np.isfinite(finish).sum() + record.extra.get("jobs_without_a_chance", 0) == len(jobs)


def test_a_time_limit_ends_a_job_after_its_time_with_gpus():
    jobs = [
        Job("a", 0.0, GpuRange(4, 4), 4, "ada", "good", 1e6, time_limit_s=100.0),
        Job("b", 0.0, GpuRange(4, 4), 4, "ada", "good", 10.0, after=(After(0, When.FAILURE),)),
        Job("c", 0.0, GpuRange(4, 4), 4, "ada", "good", 10.0, after=(After(0, When.SUCCESS),)),
        Job("d", 0.0, GpuRange(4, 4), 4, "ada", "good", 10.0, after=(After(2, When.ANY),), deadline_s=104.0),
    ]
    record = simulate(jobs, Cluster.pool(4, users=[User("ada")]), "fifo")
    assert record.finish_s[0] == 100.0
    assert record.first_start_s[1] >= 100.0
    assert np.isnan(record.finish_s[2])
    assert record.first_start_s[3] >= 100.0
    assert record.extra["time_limits_reached"] == 1
    assert record.extra["jobs_without_a_chance"] == 1
    assert (record.extra["deadlines"], record.extra["deadlines_met"]) == (1, int(record.finish_s[3] <= 104.0))


def test_submissions_beyond_the_waiting_limit_are_refused():
    users = [User("ada", limits=Limits(max_waiting_jobs=2))]
    jobs = [Job(f"j{i}", float(i > 0), GpuRange(4, 4), 4, "ada", "good", 100.0) for i in range(6)]
    record = simulate(jobs, Cluster.pool(4, users=users), "fifo")
    assert np.isfinite(record.finish_s).tolist() == [True, True, True, False, False, False]
    assert record.extra["jobs_refused"] == 3


CLUSTER = """
nodes: [{count: 1, gpus: 8, type: v100}]
users:
  - {name: ada, group: lab, max_gpus: 4, gpu_hours_per_week: 100}
  - {name: ben, tickets: 2, max_running_jobs: 1}
groups:
  - {name: lab, tickets: 3, max_gpus_of_type: {v100: 6}, max_waiting_jobs: 9}
"""
PROFILE_FILE = "model,gpus,seconds_per_iteration,gpu_type\n" + "".join(
    f"good,{n},{1.0 / n**0.8},v100\n" for n in range(1, 9)
)
HEAD = "job,user,submit_s,model,iterations,requested_gpus,max_gpus,"


def files(tmp_path, jobs, cluster=CLUSTER):
    (tmp_path / "cluster.yaml").write_text(cluster)
    (tmp_path / "jobs.csv").write_text(jobs)
    return tmp_path


def test_files_name_limits_and_conditions(tmp_path):
    text = HEAD + "priority,not_before_s,after,time_limit_s,deadline_s\n"
    text += "a,ada,0,good,100,2,2,3,,,50,\nb,ben,1,good,100,2,2,-1,20,a:any,,500\n"
    where = files(tmp_path, text)
    cluster = read_cluster(where / "cluster.yaml")
    assert cluster.users == (
        User("ada", 1.0, Limits(max_gpus=4, gpu_hours_per_week=100.0), "lab"),
        User("ben", 2.0, Limits(max_running_jobs=1)),
    )
    assert cluster.groups == (Group("lab", 3.0, Limits(max_gpus_of_type=(("v100", 6),), max_waiting_jobs=9)),)
    a, b = read_jobs(where / "jobs.csv", {"good": PROFILES["good"]}, cluster)
    assert (a.priority, a.not_before_s, a.after, a.time_limit_s, a.deadline_s) == (3, 0.0, (), 50.0, None)
    assert (b.priority, b.not_before_s, b.time_limit_s, b.deadline_s) == (-1, 20.0, None, 500.0)
    assert b.after == (After(0, When.ANY),)


@pytest.mark.parametrize(
    ("columns", "rows", "message"),
    [
        ("after", ["b", "a"], ":2: after: 'a' waits for itself, directly or through other jobs"),
        ("after", ["", "x"], ":3: after: there is no job 'x'"),
        ("after", ["", "a:maybe"], "'maybe' is not an end of a job; write success, failure or any"),
        ("time_limit_s", ["0", ""], ":2: time_limit_s: must be above 0, not 0"),
        ("deadline_s", ["", "1"], ":3: deadline_s: 1 is not after submit_s 1"),
        ("priority", ["1.5", ""], ":2: priority: '1.5' is not a whole number"),
    ],
)
def test_bad_conditions_name_line_and_field(tmp_path, columns, rows, message):
    lines = [f"{name},ada,{i},good,100,2,2,{rows[i]}\n" for i, name in enumerate("ab")]
    where = files(tmp_path, HEAD + columns + "\n" + "".join(lines))
    with pytest.raises(InputError) as error:
        read_jobs(where / "jobs.csv", {"good": PROFILES["good"]}, read_cluster(where / "cluster.yaml"))
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("group: lab", "group: labs", ":4: group: there is no group 'labs'"),
        ("max_gpus: 4", "max_gpus: -1", ":4: max_gpus: must be 0 or more, not -1"),
        ("{v100: 6}", "{a100: 6}", ":7: a100: unknown key"),
        ("max_waiting_jobs: 9", "max_waiting_jobs: 0", ":7: max_waiting_jobs: must be 1 or more, not 0"),
        ("max_running_jobs: 1", "max_runing_jobs: 1", ":5: max_runing_jobs: unknown key"),
    ],
)
def test_bad_limits_name_line_and_field(tmp_path, old, new, message):
    where = files(tmp_path, "", CLUSTER.replace(old, new))
    with pytest.raises(InputError) as error:
        read_cluster(where / "cluster.yaml")
    assert message in str(error.value)


def test_the_command_reports_limits_and_deadlines(tmp_path):
    text = HEAD + "time_limit_s,deadline_s\na,ada,0,good,1000,2,2,50,\nb,ben,1,good,10,2,2,,500\n"
    where = files(tmp_path, text)
    (where / "profiles.csv").write_text(PROFILE_FILE)
    arguments = ["sim", "run", "jobs.csv", "--profiles", "profiles.csv", "--cluster", "cluster.yaml"]
    arguments = [str(where / a) if "." in a else a for a in arguments]
    result = CliRunner().invoke(cli, [*arguments, "--policy", "fair-afs", "-o", "json"])
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)
    figures = figures.get("runs", [figures])[0] if isinstance(figures, dict) else figures[0]
    assert figures["time_limits_reached"] == 1
    assert figures["deadlines_met"] == 1
