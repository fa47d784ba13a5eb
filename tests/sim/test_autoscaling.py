"""The autoscaler in the simulator: it searches a job's size beside the policy that shares out the GPUs."""

from __future__ import annotations

import csv
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint

import numpy as np
import pytest

from shoal.core.cluster import Cluster
from shoal.core.errors import ShoalError
from shoal.core.profile import Profile
from shoal.knowledge.heuristics import Verdict
from shoal.policies.registry import policy_class, policy_names
from shoal.sim.inputs import read_jobs, read_profiles

from .small import job, simulate

#: Perfect up to six GPUs, then not a bit faster for more.
KNEE = Profile.of("knee", {n: 1.0 / min(n, 6) - 1e-6 * n for n in range(1, 17)})
ELASTIC = [name for name in policy_names() if policy_class(name).elastic]
HALF = "efficiency:threshold=0.5"


def sizes(record, j=0):
    return [gpus for gpus, whose in zip(record.change_gpus, record.change_job) if whose == j]


def searched(autoscale=HALF, policy="afs-p", gpus=16, jobs=None, profiles=None, **more):
    one = job("a", 0.0, 20_000.0, gpus=16, most=16, model="knee", autoscale=autoscale)
    return simulate(jobs or [one], policy, gpus, profiles=profiles or {"knee": KNEE}, **more)


@pytest.mark.parametrize("policy", ELASTIC)
def test_under_every_policy_that_resizes_it_ends_at_the_knee(policy):
    record = searched(policy=policy)
    assert sizes(record)[:3] == [1, 2, 4]
    assert sizes(record)[-2:] == [6, 0]
    figures = record.extra["autoscaler"]
    assert figures["found"] == 1
    assert figures["median_search_s"] < 100
    assert sizes(searched("", policy))[0] == 16, "without it the policy gives all there is"


def test_a_policy_that_does_not_resize_goes_on_as_without_it():
    assert sizes(searched(policy="fifo")) == [16, 0]


def test_what_it_does_not_want_goes_to_others():
    one = job("a", 0.0, 20_000.0, gpus=16, most=16, model="knee", autoscale=HALF)
    other = job("b", 0.0, 20_000.0, gpus=16, most=16, model="linear")
    linear = Profile.of("linear", {n: 1.0 / n for n in range(1, 17)})
    profiles = {"knee": KNEE, "linear": linear}
    with_search = searched(jobs=[one, other], policy="max-min", profiles=profiles)
    without = searched(jobs=[replace(one, autoscale=""), other], policy="max-min", profiles=profiles)
    assert max(sizes(with_search)) <= 8
    assert 10 in sizes(with_search, 1), "16 less the knee's six"
    assert with_search.finish_s[1] < without.finish_s[1]


def test_while_others_need_the_gpus_it_waits_and_climbs_when_they_are_gone():
    one = job("a", 0.0, 20_000.0, gpus=8, most=8, model="knee", autoscale=HALF)
    others = [job(f"b{i}", 1.0, 300.0, gpus=2, least=2, model="linear") for i in range(3)]
    linear = Profile.of("linear", {n: 1.0 / n for n in range(1, 17)})
    record = searched(jobs=[one, *others], gpus=8, profiles={"knee": KNEE, "linear": linear})
    gone_s = float(record.finish_s[1:].max())
    before = [
        g for t, g, j in zip(record.change_s, record.change_gpus, record.change_job) if j == 0 and t < gone_s
    ]
    assert max(before) == 2
    assert sizes(record)[-2:] == [6, 0]


def test_resizes_that_do_not_pay_for_themselves_are_not_made():
    """With 30 s of standstill for each, a job of 40 s is better left alone."""
    from shoal.sim.costs import Costs

    brief = job("a", 0.0, 40.0, gpus=16, most=16, model="knee", autoscale=HALF)
    costs = Costs("restart", restart_s=30.0, restart_by_model={})
    assert sizes(searched(jobs=[brief], costs=costs)) == [1, 0]
    assert sizes(searched(jobs=[brief]))[:3] == [1, 2, 4]


def test_the_same_seed_searches_the_same_way():
    runs = [searched(seed=seed).change_s for seed in (1, 1, 2)]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


def is_right(gpus: int, step_s: dict[int, float], speed, limit: float, within: float) -> bool:
    """Up to this size each GPU added enough, and beyond it not: by the sizes measured around it."""

    def efficiency(smaller, larger):
        return (speed[larger] / speed[smaller] - 1.0) * smaller / (larger - smaller)

    below, above = [n for n in step_s if n < gpus], [n for n in step_s if n > gpus]
    into = efficiency(max(below), gpus) if below else 1.0
    beyond = efficiency(gpus, min(above)) if above else 0.0
    return into > limit - within and beyond < limit + within


@pytest.mark.reference
def test_on_measured_curves_with_noise_it_ends_at_the_right_size(shared_data):
    """The curves that the AFS authors measured, seen with 5 % noise."""
    path = shared_data / "afs" / "profiles.csv"
    profiles, step_s = read_profiles(path), {}
    for row in csv.DictReader(path.open()):
        step_s.setdefault(row["model"], {})[int(row["gpus"])] = float(row["seconds_per_iteration"])
    right = {}
    for model, profile in profiles.items():
        speed = profile.curve("gpu").speed
        most = len(speed) - 1
        one = job("a", 0.0, 5e5, gpus=most, most=most, model=model, autoscale=HALF)
        for seed in range(3):
            found = sizes(searched(jobs=[one], gpus=most, profiles=profiles, seed=seed))[-2]
            right[model, seed, found] = is_right(found, step_s[model], speed, 0.5, within=0.1)
    assert np.mean(list(right.values())) >= 0.85, right


def test_a_column_of_the_trace_says_which_jobs_are_searched_and_mistakes_are_told_with_their_line(tmp_path):
    trace = tmp_path / "jobs.csv"
    header = "submit_s,model,iterations,requested_gpus,max_gpus,autoscale\n"
    profiles = {"knee": KNEE}
    trace.write_text(header + f"0,knee,100,4,16,{HALF}\n1,knee,100,4,16,\n")
    jobs = read_jobs(trace, profiles, Cluster.pool(16))
    assert [j.autoscale for j in jobs] == [HALF, ""]
    trace.write_text(header + "0,knee,100,4,16,\n1,knee,100,4,16,speed\n")
    with pytest.raises(ShoalError, match=r"jobs.csv:3.*there is no heuristic named speed"):
        read_jobs(trace, profiles, Cluster.pool(16))


@dataclass(frozen=True)
class UpTo:
    """A heuristic of someone else's, with an option."""

    gpus: int = 2

    def judge(self, smaller, larger, progress):
        return Verdict(self.gpus - larger.gpus + 0.5, 0.0, f"{larger.gpus} GPUs against {self.gpus}")


def test_a_heuristic_of_ones_own_is_found_by_its_entry_point_and_given_its_options(monkeypatch):
    own = EntryPoint("up-to", f"{__name__}:UpTo", "shoal.heuristics")
    monkeypatch.setattr("shoal.knowledge.heuristics.entry_points", lambda group: [own])
    assert sizes(searched("up-to"))[-2:] == [2, 0]
    assert sizes(searched("up-to:gpus=5"))[-2:] == [5, 0]
    with pytest.raises(ShoalError, match="has no option 'most'"):
        searched("up-to:most=5")
