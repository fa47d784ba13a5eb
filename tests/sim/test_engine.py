"""The virtual cluster: small runs that can be checked by hand."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from shoal.core.cluster import Cluster
from shoal.core.profile import Profile
from shoal.policies.registry import make_policy, policy_names
from shoal.sim.costs import Costs
from shoal.sim.engine import Simulation
from shoal.sim.run_record import RunRecord
from shoal.sim.summary import summary

from .small import PROFILES, job, simulate


def test_one_job_alone_takes_its_work_over_its_speed():
    record = simulate([job("a", 5.0, 100.0, gpus=4)], "fifo")
    assert record.finish_s.tolist() == [30.0]
    assert record.gpu_s.tolist() == [100.0]
    assert record.first_start_s.tolist() == [5.0]


def test_fifo_lets_a_small_job_pass_a_large_one_that_does_not_fit():
    jobs = [job("a", 0, 30.0, 3), job("b", 1, 40.0, 4), job("c", 2, 5.0, 1)]
    record = simulate(jobs, "fifo")
    assert record.finish_s.tolist() == [10.0, 20.0, 7.0]


def test_strict_fifo_does_not():
    jobs = [job("a", 0, 30.0, 3), job("b", 1, 40.0, 4), job("c", 2, 5.0, 1)]
    record = simulate(jobs, "fifo", options={"backfill": "no"})
    assert record.finish_s.tolist() == [10.0, 20.0, 25.0]


def test_srtf_stops_a_long_job_for_a_short_one_and_takes_it_up_again():
    jobs = [job("long", 0, 400.0, 4), job("short", 10, 40.0, 4)]
    record = simulate(jobs, "srtf")
    assert record.finish_s.tolist() == [110.0, 20.0]
    assert record.changes.tolist() == [3, 1]  # start, pause, resume
    assert record.wait_s.tolist() == [10.0, 0.0]


def test_max_min_halves_the_cluster_when_a_second_job_comes():
    jobs = [job("a", 0, 60.0, 1, most=4), job("b", 5, 20.0, 1, most=4)]
    record = simulate(jobs, "max-min")
    # a: 20 done by 5, then 2 GPUs each until b has done its 20 at 15, then 4 GPUs again for the last 20.
    assert record.finish_s.tolist() == [20.0, 15.0]


def test_tiresias_demotes_a_job_once_it_has_had_its_service():
    jobs = [job("old", 0, 100.0, 4), job("new", 1, 40.0, 4)]
    record = simulate(jobs, "tiresias-l", options={"thresholds_gpu_s": "40"})
    # old: 40 GPU-seconds by 10, then new runs (its own 40 by 20, when both are equal and old started first).
    assert record.finish_s.tolist() == [35.0, 20.0]


def test_a_promoted_job_comes_back_though_others_keep_arriving():
    jobs = [job("old", 0, 100.0, 4)] + [job(f"n{i}", 10.0 * i, 40.0, 4) for i in range(1, 30)]
    plain = simulate(jobs, "tiresias-l", options={"thresholds_gpu_s": "40", "service": "attained"})
    promoted = simulate(
        jobs, "tiresias-l", options={"thresholds_gpu_s": "40", "service": "attained", "promote": "2"}
    )
    assert plain.finish_s[0] > 250
    assert promoted.finish_s[0] < 150


def test_the_gittins_index_prefers_the_job_most_likely_to_end():
    # Services are 10 or 1000: after 10 GPU-seconds a job is known to be long.
    options = {"distribution_gpu_s": "10,10,10,1000", "thresholds_gpu_s": "1e9"}
    jobs = [job("long", 0, 1000.0, 4), job("short", 5, 10.0, 4)]
    record = simulate(jobs, "tiresias-g", options=options)
    assert record.finish_s[1] == pytest.approx(7.5)


def test_restarts_stop_a_job_for_their_cost_and_concurrent_switches_do_not():
    jobs = [job("a", 0, 80.0, 1, most=4), job("b", 10, 10.0, 1, most=1, model="flat")]
    free = simulate(jobs, "max-min")
    restart = simulate(jobs, "max-min", costs=Costs("restart", restart_s=5.0))
    concurrent = simulate(jobs, "max-min", costs=Costs("concurrent", prepare_s=2.0, pause_s=0.5))
    # a: 40 by 10; then 3 GPUs while b runs, 30 more by 20; the last 10 at 4 GPUs by 22.5.
    assert free.finish_s[0] == 22.5
    # Two restarts of 5 s: 15..20 at 3 GPUs is 15 more; from 25 on 25 left at 4 GPUs.
    assert restart.finish_s[0] == pytest.approx(20 + 5 + 25 / 4)
    assert restart.paused_s[0] == 10.0
    # A shrink pauses 0.5 s; growing prepares until 22 at the old speed, then pauses 0.5 s.
    left = 80 - 40 - 9.5 * 3 - 2 * 3
    assert concurrent.finish_s[0] == pytest.approx(22 + 0.5 + left / 4)
    assert concurrent.paused_s[0] == 1.0


def test_a_restart_costs_what_the_model_is_known_to_take_or_else_the_general_figure():
    costs = Costs("restart", restart_s=30.0)
    assert costs.restart_of("vgg16") == pytest.approx(0.3524 + 3.5694, abs=0.01)
    assert costs.restart_of("some-other-model") == 30.0


def test_a_newer_target_cancels_one_that_is_still_being_prepared():
    jobs = [
        job("a", 0, 1000.0, 1, most=4),
        job("b", 10, 5.0, 1, most=1, model="flat"),
        job("c", 16, 5.0, 1, most=1, model="flat"),
    ]
    record = simulate(jobs, "max-min", costs=Costs("concurrent", prepare_s=30.0, pause_s=0.5))
    # b's end at 15 lets a grow, c's arrival at 16 takes that back before it was ready: no pause for it.
    assert record.paused_s[0] == pytest.approx(0.5 + 0.5)


def test_times_are_rounded_up_to_whole_seconds_on_demand():
    record = simulate([job("a", 0.2, 10.0, 4)], "fifo", whole_seconds=True)
    assert record.finish_s.tolist() == [4.0]


@pytest.mark.parametrize("policy", policy_names())
def test_every_policy_finishes_every_job_and_wastes_no_work(policy):
    rng = np.random.default_rng(1)
    jobs = [
        job(f"j{i}", float(at), float(rng.integers(1, 500)), gpus=int(rng.integers(1, 5)), most=8)
        for i, at in enumerate(np.sort(rng.uniform(0, 300, 40)))
    ]
    record = simulate(jobs, policy, gpus=8)
    assert np.isfinite(record.finish_s).all()
    # Speed is linear in GPUs, so GPU-seconds are the work whatever the shares on the way.
    np.testing.assert_allclose(record.gpu_s, [j.iterations for j in jobs], rtol=1e-6)
    used = np.repeat(record.used[:-1], 1)
    area = float((used * np.diff(record.times_s)).sum())
    assert area == pytest.approx(sum(j.iterations for j in jobs), rel=1e-6)
    assert max(record.used) <= 8


@pytest.mark.parametrize("policy", ["afs-p", "gandiva-fair"])
def test_the_same_seed_gives_the_same_run(policy):
    if policy not in policy_names():
        pytest.skip(f"{policy} is not there")
    jobs = [job(f"j{i}", i * 3.0, 50.0 + i, gpus=1, most=8) for i in range(30)]

    def run(seed):
        return Simulation(jobs, PROFILES, Cluster.pool(8), make_policy(policy, seed=seed)).run().finish_s

    np.testing.assert_array_equal(run(3), run(3))


def test_speed_depends_on_the_number_of_nodes_where_it_was_measured():
    profile = Profile.from_rows("m", [("*", 4, 1, 1.0), ("*", 4, 2, 4.0), ("*", 1, 1, 4.0)])
    from shoal.placement.keep_and_pack import KeepAndPack

    jobs = [job("a", 0, 100.0, 4, least=4, most=4, model="m")]
    for nodes, expected in ((Cluster.of(1, 4), 100.0), (Cluster.of(2, 2), 400.0)):
        record = simulate(jobs, "fifo", cluster=nodes, profiles={"m": profile}, placer=KeepAndPack())
        assert record.finish_s.tolist() == [expected]


def test_the_figures_of_a_run_are_what_they_say():
    jobs = [job("a", 0, 40.0, 4, user="ada"), job("b", 0, 40.0, 4, user="ben")]
    figures = summary(simulate(jobs, "fifo"), PROFILES, "gpu")
    assert figures["avg_jct_s"] == 15.0
    assert figures["p50_jct_s"] in (10.0, 20.0)
    assert figures["makespan_s"] == 20.0
    assert figures["avg_queue_s"] == 5.0
    assert figures["utilization"] == 1.0
    assert figures["gpu_seconds_by_user"] == {"ada": 40.0, "ben": 40.0}
    # Mean active jobs 1.5, so a fair share is 4/1.5 GPUs and alone a job would take 15 s.
    assert figures["finish_time_fairness"]["max"] == pytest.approx(20 / 15)


def test_what_is_known_when_a_run_is_stopped_counts_the_jobs_that_run():
    jobs = [job("short", 0.0, 10.0), job("long", 0.0, 1e6), job("late", 1000.0, 5.0)]
    simulation = Simulation(jobs, PROFILES, Cluster.pool(2), make_policy("fifo"))
    record = simulation.run(lambda now_s, done, total: now_s < 1000.0, every=1)
    figures = summary(record, PROFILES, "gpu")
    assert figures["interrupted"]
    assert (figures["makespan_s"], figures["simulated_s"]) == (None, 1000.0)
    assert record.gpu_s.tolist() == [10.0, 1000.0, 0.0]
    assert figures["utilization"] == pytest.approx(1010 / 2000)


@pytest.mark.parametrize("whole_seconds", [False, True])
@pytest.mark.parametrize("policy", policy_names())
def test_a_plain_run_is_the_same_as_one_step_by_step(policy, whole_seconds, monkeypatch):
    jobs = [job(f"j{i}", 7.3 * i, 50.0 + 37 * (i % 5), 1 + i % 3, most=4) for i in range(40)]
    runs = []
    for plain in (True, False):
        if not plain:
            monkeypatch.setattr(Simulation, "_is_simple", lambda self: False)
        runs.append(simulate(jobs, policy, whole_seconds=whole_seconds))
    for field in dataclasses.fields(RunRecord):
        one, other = (getattr(run, field.name) for run in runs)
        assert np.array_equal(one, other, equal_nan=True) if isinstance(one, np.ndarray) else one == other
    assert runs[0].changes.sum() >= len(jobs)
