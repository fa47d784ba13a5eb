"""The comparison with Resource Elasticity: its signs, its size, and the rules behind it."""

from __future__ import annotations

import csv

import numpy as np
import pytest
from scipy.optimize import nnls

from shoal.knowledge.autoscaler import IMPROVED
from shoal.knowledge.heuristics import ScalingEfficiency
from shoal.knowledge.speed_models import ALL_REDUCE
from shoal.sim.papers import elasticity
from shoal.sim.papers.elasticity_runs import (
    CIFAR,
    IMAGENET,
    autoscaled,
    static,
    steps_to_find,
    with_straggler,
)


@pytest.fixture(scope="module")
def result():
    return elasticity.run(seed=0, quick=True)


def compared(result, training: str, engine: str, start: int = 4):
    return next(
        one
        for one in result["compared"]
        if (one["training"], one["engine"], one["from"]) == (training, engine, start)
    )


@pytest.mark.parametrize("engine", elasticity.ENGINES)
def test_cifar_saves_most_of_the_gpu_time_and_imagenet_pays_for_time_with_gpus(result, engine):
    cifar = compared(result, "CIFAR-10", engine)
    assert -90 < cifar["gpu_time"]["mean"] < -40
    assert cifar["gpu_time"]["most"] < -75
    imagenet = compared(result, "ImageNet", engine, 32)
    assert -30 < imagenet["jct"]["mean"] < -10
    assert 0 < imagenet["gpu_time"]["mean"] < 20


def test_ours_is_faster_than_the_static_runs_on_average_and_finds_the_size_of_imagenet_sooner(result):
    ours, theirs = (compared(result, "ImageNet", engine) for engine in ("ours", "the authors' rules"))
    assert ours["found_s"]["mean"] < theirs["found_s"]["mean"]
    assert ours["part"]["mean"] < 2.0
    cifar = compared(result, "CIFAR-10", "ours")
    assert cifar["jct"]["mean"] < 0
    assert cifar["part"]["mean"] < 10.0


def test_the_curves_are_those_of_the_limits_of_the_batch():
    assert [CIFAR.batch(k) for k in (4, 8, 60)] == [1024, 1024, 1024]
    assert [IMAGENET.batch(k) for k in (4, 64)] == [512, 8192]
    assert CIFAR.throughput(60) < CIFAR.throughput(4), "more workers with fewer samples each are slower"
    assert IMAGENET.throughput(64) > 8 * IMAGENET.throughput(4)


def test_a_run_that_begins_at_its_size_takes_about_as_long_as_a_static_one():
    run = autoscaled(IMAGENET, 64, ScalingEfficiency(0.1), IMPROVED, np.random.default_rng(0))
    assert run.workers == 64
    assert run.seconds == pytest.approx(static(IMAGENET, 64).seconds, rel=0.03)


def test_an_urgent_utility_takes_more_workers_than_one_that_is_not(result):
    imagenet = next(one["found"] for one in result["heuristics"] if one["training"] == "ImageNet")
    assert imagenet["utility, urgent"]["workers"] > imagenet["utility, not urgent"]["workers"]
    assert imagenet["efficiency, S = 0.5"]["workers"] <= imagenet["efficiency, S = 0.1"]["workers"]


@pytest.mark.parametrize("training", ["CIFAR-10", "ImageNet"])
def test_without_a_limit_of_the_batch_a_training_grows_further(result, training):
    found = next(one["found"] for one in result["batch_limit"] if one["training"] == training)
    assert found["with its limit"]["workers"] < found["without a limit"]["workers"]


@pytest.mark.parametrize(("training", "folder"), [(CIFAR, "cifar10"), (IMAGENET, "imagenet")])
def test_the_curves_follow_from_the_public_measurements(shared_data, training, folder):
    configs, seconds = [], []
    for which in ("placements", "scalability"):
        with (shared_data / "pollux" / folder / f"{which}.csv").open(newline="") as file:
            for row in csv.DictReader(file):
                where = [int(digit) for digit in row.get("placement", "")]
                gpus = sum(where) or int(row["num_replicas"])
                nodes = len(where) or int(row["num_nodes"])
                configs.append((gpus, nodes, float(row["local_bsz"])))
                seconds.append(float(row["step_time"]))
    rows = ALL_REDUCE.rows(np.array(configs, float)) / np.array(seconds)[:, None]
    fitted, _ = nnls(rows, np.ones(len(seconds)))
    assert training.theta == pytest.approx(fitted, rel=0.02, abs=1e-5)
    assert np.mean(np.abs(rows @ fitted - 1.0)) < 0.12


def test_what_differs_from_the_paper_is_said_with_the_figures_of_the_run(result):
    theirs, imagenet = (compared(result, name, elasticity.AUTHORS) for name in ("CIFAR-10", "ImageNet"))
    assert theirs["jct"]["mean"] > 0 > theirs["jct"]["paper"][0]
    assert f"is not reproduced ({theirs['jct']['mean']:+.1f} %, paper -8.2 %)" in result["why"]
    assert (
        f"found after {imagenet['found_s']['mean']:.0f} s on average, in the paper after 264 s"
        in result["why"]
    )
    assert "lengths of the trainings were chosen by us" in result["why"]


def test_a_straggler_is_replaced_after_the_steps_that_its_rule_needs():
    assert steps_to_find(1.2) is None
    assert steps_to_find(1.333) == 16
    assert steps_to_find(2.0) == 5
    alone = static(CIFAR, 8).seconds
    kept, replaced = (with_straggler(CIFAR, 8, 2.0, replaces=replaces) for replaces in (False, True))
    assert kept > 1.3 * alone
    assert replaced < 1.01 * alone


def test_the_table_shows_ours_next_to_the_papers_and_the_plot_is_drawn(result, tmp_path):
    text = elasticity.render(result)
    for figure in ("-58.6", "+7.4", "72.8", "81.2", "264 s", "61 s"):
        assert figure in text
    assert result["why"] in text
    elasticity.plot(result, tmp_path / "elasticity.png")
    assert (tmp_path / "elasticity.png").stat().st_size > 10_000
