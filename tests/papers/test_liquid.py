"""The Liquid comparisons: their direction, what the published times allow, and the rules on one GPU."""

from __future__ import annotations

import numpy as np
import pytest

from shoal.core.cluster import Cluster
from shoal.placement.grouping_ga import Search
from shoal.sim.papers import liquid, liquid_one_gpu, liquid_placing


@pytest.fixture(scope="module")
def result():
    return liquid.run(seed=0, quick=True)


@pytest.mark.parametrize("against", ["random", "even", "kubernetes"])
def test_liquid_executes_faster_than_those_who_spread(result, against):
    ours = next(r["ours"] for r in result["rows"] if (r["mode"], r["against"]) == ("immediate", against))
    assert ours > 8


def test_no_one_is_faster_in_batch_mode(result):
    for row in result["rows"]:
        if row["mode"] == "batch" and row["metric"] == "jct":
            assert row["ours"] > 0, row


def test_the_gains_in_batch_mode_are_within_what_the_published_times_allow(result):
    assert result["bounds"]["two_gpus"] == pytest.approx({"p:w:w": 3.3, "p:ww": 26.9}, abs=0.2)
    assert result["bounds"]["four_gpus"]["p:w:w"] == pytest.approx(13.6, abs=0.2)
    for one in result["batch"]:
        assert one["figures"]["liquid"]["layouts"]["pw:w"] == 1.0


def test_the_score_as_printed_keeps_workers_from_their_server(result):
    printed, code = result["immediate"]["liquid, as printed"], result["immediate"]["liquid"]
    assert printed["layouts"]["pww"] < 0.5 < code["layouts"]["pww"]


@pytest.mark.parametrize("name", sorted(liquid_placing.strategies(Cluster.of(5, 2))))
def test_every_strategy_takes_three_free_gpus(name):
    rng = np.random.default_rng(0)
    cluster = Cluster.of(6, 4)
    pick = liquid_placing.strategies(cluster)[name]
    for _ in range(200):
        free = rng.integers(0, 5, 6).astype(np.int32)
        if free.sum() < 3:
            continue
        nodes = pick(free, rng)
        assert len(nodes) == 3
        assert (np.bincount(nodes, minlength=6) <= free).all()


def test_all_jobs_of_a_batch_run_end_and_no_gpu_is_used_twice():
    figures = liquid_placing.batch(10, np.random.default_rng(1), Search(max_plans=500))
    assert sum(figures["layouts"].values()) == 16
    assert figures["makespan_s"] >= max(figures["execution_s"].values())


def test_polling_costs_what_the_paper_reports_and_launching_early_saves(result):
    rows = {(r["gpu"], r["jobs"], r["what"].split(":")[0]): r for r in result["one_gpu"]}
    for key, row in rows.items():
        if key[0] == "mean":
            continue
        if key[2] == "event-driven":
            assert row["ours"] == pytest.approx(row["paper"], abs=1.5)
        if key[2] == "pre-scheduling":
            assert 30 < row["ours"] < 80
        if key[2] == "sharing":
            assert row["ours"] == pytest.approx(40)


@pytest.mark.parametrize(
    ("utilisation", "minutes"), [(0.3, 30), (0.5, 30), (0.6, 36), (0.64, 38.4), (0.65, 60), (0.9, 60)]
)
def test_two_jobs_share_a_gpu_up_to_130_per_cent(utilisation, minutes):
    assert liquid_one_gpu.shared_min(60, utilisation) == pytest.approx(minutes)


def test_a_longer_way_to_the_first_use_of_the_gpu_is_hidden_by_launching_early():
    work = liquid_one_gpu.Workload("long", 4, 100, pre_s=60, post_s=2)
    idle = {
        early: liquid_one_gpu.idle_s(work, np.random.default_rng(0), event_driven=True, pre_schedule=early)
        for early in (False, True)
    }
    assert idle[False] > 3 * 60
    assert idle[True] < 3 * 12  # two reports, five seconds apart


def test_the_means_are_next_to_the_papers_headlines(result):
    means = {
        r["what"].split(":")[0]: (r["ours"], r["paper"]) for r in result["one_gpu"] if r["gpu"] == "mean"
    }
    assert [round(paper) for _, paper in means.values()] == [38, 44, 13]
    assert means["sharing"][0] == pytest.approx(40)


def test_the_decisions_of_placement_are_the_ones_that_are_used(monkeypatch):
    work = liquid_one_gpu.WORKLOADS["k80"][0]

    def idle():
        return liquid_one_gpu.idle_s(work, np.random.default_rng(0), event_driven=True, pre_schedule=True)

    by_the_rules = idle()
    rule = liquid_one_gpu.may_enter
    monkeypatch.setattr(liquid_one_gpu, "may_enter", lambda reports, *more: rule(reports[:-2], *more))
    assert idle() > by_the_rules, "who is let in two reports later leaves the GPU idle for longer"


def test_the_same_seed_gives_the_same_result(result):
    assert liquid.run(seed=0, quick=True) == result


def test_the_tables_and_the_plot(result, tmp_path):
    text = liquid.render(result)
    for word in ("kubernetes", "hived", "pre-scheduling", "paper", "AdaBoost", "0.58 (1210)"):
        assert word in text
    assert result["why"] in text
    liquid.plot(result, tmp_path / "liquid.png")
    assert (tmp_path / "liquid.png").stat().st_size > 10_000


def test_the_forest_is_ahead_of_the_linear_model_and_learns_from_more_jobs(result):
    at = {(row["regressor"], row["jobs"]): row for row in result["estimates"]}
    assert all(at["random forest", jobs]["r2"] > at["linear", jobs]["r2"] for jobs in (100, 200, 300, 400))
    assert at["random forest", 400]["r2"] > at["random forest", 100]["r2"]
    assert all(row["rmse"] > 0 for row in result["estimates"])
