"""The Optimus comparison: its direction, that it can be repeated, and that nothing is lost on the way."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shoal.sim.papers import optimus

SMALL = optimus.Setting("small", jobs=6, nodes=8, arrive_s=3600.0)


@pytest.fixture(scope="module")
def result():
    return optimus.run(seed=0, quick=True)


def ratio(result, scheduler: str, metric: str) -> float:
    return next(r["ours"] for r in result["rows"] if (r["scheduler"], r["metric"]) == (scheduler, metric))


@pytest.mark.parametrize("metric", ["jct", "makespan"])
@pytest.mark.parametrize("baseline", ["drf", "tetris"])
def test_optimus_is_ahead_of_drf_and_tetris_in_jct_and_makespan(result, baseline, metric):
    assert ratio(result, baseline, metric) > 1.2


def test_both_its_allocation_and_its_placement_contribute_and_the_allocation_more(result):
    by_allocation = ratio(result, "optimus, spread", "jct")
    by_placement = ratio(result, "drf, packed", "jct")
    assert 1.0 < by_allocation < by_placement < ratio(result, "drf", "jct")


def test_predictions_that_err_point_by_point_cost_optimus_more_than_a_curve_that_is_off():
    def mean_jct(setting: optimus.Setting) -> float:
        return float(np.mean([optimus.simulate(setting, "optimus", seed)["jct_s"] for seed in range(4)]))

    exact = optimus.Setting("exact", 9, 13, 12_000.0, length_error=0.0, speed_error=0.0)
    pointwise = optimus.Setting("p", 9, 13, 12_000.0, length_error=0.0, speed_error=0.1, pointwise=True)
    curve = optimus.Setting("c", 9, 13, 12_000.0, length_error=0.0, speed_error=0.1)
    assert mean_jct(pointwise) > mean_jct(curve)
    assert mean_jct(curve) < 1.1 * mean_jct(exact)


def test_longer_exchanges_slow_the_baselines_and_not_optimus():
    slower = replace(SMALL, baseline_exchange=1.5)
    for scheduler in ("drf", "tetris"):
        assert (
            optimus.simulate(slower, scheduler, 1)["jct_s"] > optimus.simulate(SMALL, scheduler, 1)["jct_s"]
        )
    assert optimus.simulate(slower, "optimus", 1) == optimus.simulate(SMALL, "optimus", 1)


def test_the_makespan_ratio_grows_with_the_length_of_the_jobs_as_arrivals_matter_less():
    def makespan_ratio(setting: optimus.Setting) -> float:
        drf, ours = (
            sum(optimus.simulate(setting, scheduler, seed)["makespan_s"] for seed in range(2))
            for scheduler in ("drf", "optimus")
        )
        return drf / ours

    assert makespan_ratio(replace(optimus.TESTBED, length=4.0)) > makespan_ratio(optimus.TESTBED) + 0.1


def test_restarting_at_every_change_costs_a_few_per_cent_at_most(result):
    (one,) = result["settings"]
    assert all(f["restart_part"] < 0.03 for f in one["schedulers"].values())


def test_the_same_seed_gives_the_same_figures_and_another_seed_others():
    one = optimus.simulate(SMALL, "optimus", 1)
    assert one == optimus.simulate(SMALL, "optimus", 1)
    assert one != optimus.simulate(SMALL, "optimus", 2)


def test_a_job_alone_takes_as_long_as_its_speed_says():
    setting = optimus.Setting("alone", 1, 40, 1.0, restart_s=0.0, length_error=0.0, speed_error=0.0)
    (job,) = optimus.make_jobs(setting, np.random.default_rng(4))
    figures = optimus.simulate(setting, "optimus", 4)
    fastest_s = job.steps / job.speed.max()
    start_s = optimus.SLOT_S - job.arrive_s  # it arrives just after a slot has begun
    assert start_s + fastest_s <= figures["jct_s"] <= start_s + 2 * fastest_s


@pytest.mark.parametrize("scheduler", sorted(optimus.SCHEDULERS))
def test_no_schedule_takes_more_than_there_is(scheduler):
    rng = np.random.default_rng(3)
    active = optimus.make_jobs(SMALL, rng)
    capacity = np.tile(optimus.NODE, (SMALL.nodes, 1))
    placed = optimus._schedule(active, capacity, *optimus.SCHEDULERS[scheduler])
    used = np.zeros_like(capacity)
    for job, node, ps, workers in zip(placed.job, placed.node, placed.ps, placed.workers):
        used[node] += ps * active[job].ps_need + workers * active[job].worker_need
    assert (used <= capacity + 1e-9).all()
    assert placed.placed_workers.sum() > 0


def test_the_table_shows_ours_next_to_the_papers_and_the_plot_is_drawn(result, tmp_path):
    text = optimus.render(result)
    assert "2.39" in text
    assert "1.63" in text
    assert result["why"] in text
    optimus.plot(result, tmp_path / "optimus.png")
    assert (tmp_path / "optimus.png").stat().st_size > 10_000
