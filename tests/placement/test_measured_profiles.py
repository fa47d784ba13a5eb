"""Profiles from measured placements: by hand, and from the published measurements."""

from __future__ import annotations

import csv

import pytest

from shoal.core.errors import ShoalError
from shoal.placement.measured_profiles import iteration_times, profile_from_placements
from shoal.sim.runner import Setup, run

ROWS = [
    ("1", 16, 1.0), ("1", 32, 1.8), ("2", 16, 1.1), ("2", 32, 2.0),
    ("11", 16, 1.5), ("11", 32, 2.4), ("31", 8, 1.2), ("22", 8, 1.4), ("4", 8, 0.8), ("1111", 16, 9.0),
]  # fmt: skip


def test_each_share_runs_at_its_own_batch_per_gpu():
    profile = profile_from_placements("m", ROWS, global_batch=32)
    assert 1 / profile.speed("gpu", 1, 1) == pytest.approx(1.8)
    assert 1 / profile.speed("gpu", 2, 1) == pytest.approx(1.1)
    assert 1 / profile.speed("gpu", 2, 2) == pytest.approx(1.5)
    assert 1 / profile.speed("gpu", 4, 1) == pytest.approx(0.8)
    assert 1 / profile.speed("gpu", 4, 2) == pytest.approx(1.3), "the mean of 31 and 22"


def test_between_measured_batches_it_interpolates_and_above_them_it_accumulates():
    assert 1 / profile_from_placements("m", ROWS, 24).speed("gpu", 1, 1) == pytest.approx(1.4)
    assert 1 / profile_from_placements("m", ROWS, 64).speed("gpu", 1, 1) == pytest.approx(3.6)


def test_below_the_measured_batches_nothing_is_known():
    profile = profile_from_placements("m", ROWS, 32)
    assert 4 not in profile.curves["*"], "1111 was measured with twice the batch only"
    with pytest.raises(ShoalError, match="global batch of 1"):
        profile_from_placements("m", [("1", 16, 1.0)], 1)


@pytest.mark.parametrize("row", [("4a", 8, 1.0), ("40", 8, 1.0), ("4", 0, 1.0), ("4", 8, float("nan"))])
def test_rows_that_are_no_measurement_are_refused(row):
    with pytest.raises(ShoalError, match="not a measured placement"):
        profile_from_placements("m", [row], 8)


@pytest.mark.reference
@pytest.mark.parametrize(("model", "batch"), [("bert", 48), ("cifar10", 512), ("imagenet", 80)])
def test_four_gpus_of_one_node_beat_four_of_several_as_measured(shared_data, model, batch):
    with (shared_data / "pollux" / model / "placements.csv").open() as file:
        rows = [(r["placement"], float(r["local_bsz"]), float(r["step_time"])) for r in csv.DictReader(file)]
    profile = profile_from_placements(model, rows, batch)
    one, two, four = (profile.speed("gpu", 4, nodes) for nodes in (1, 2, 4))
    assert one > 1.2 * two
    assert one > 1.05 * four


@pytest.mark.reference
@pytest.mark.parametrize(("model", "batch"), [("bert", 48), ("cifar10", 512)])
def test_measured_placements_written_to_profiles_csv_decide_how_long_a_simulated_job_takes(
    shared_data, tmp_path, model, batch
):
    with (shared_data / "pollux" / model / "placements.csv").open() as file:
        rows = [(r["placement"], float(r["local_bsz"]), float(r["step_time"])) for r in csv.DictReader(file)]
    times = {(gpus, nodes): s for gpus, nodes, s in iteration_times(model, rows, batch)}
    lines = [
        "model,gpus,nodes,seconds_per_iteration",
        *(f"{model},{g},{n},{s}" for (g, n), s in times.items()),
    ]
    (tmp_path / "profiles.csv").write_text("\n".join(lines))
    head = "submit_s,model,iterations,requested_gpus,max_gpus,min_gpus\n"
    (tmp_path / "jobs.csv").write_text(f"{head}0,{model},1000,4,4,4\n")
    for nodes, gpus in ((1, 4), (2, 2), (4, 1)):
        (tmp_path / "cluster.yaml").write_text(f"nodes:\n  - {{count: {nodes}, gpus: {gpus}}}\n")
        setup = Setup(
            tmp_path / "jobs.csv", tmp_path / "profiles.csv", "fifo", cluster=tmp_path / "cluster.yaml"
        )
        assert run(setup).record.finish_s[0] == pytest.approx(1000 * times[4, nodes])
