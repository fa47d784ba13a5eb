"""Synthetic traces: the load asked for, the shape of Philly, the same trace for the same seed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import ks_2samp

from shoal.core.cluster import Cluster
from shoal.core.errors import ShoalError
from shoal.core.profile import Profile
from shoal.sim.generate import ARRIVALS, DAY_S, PHILLY_SIZES, Recipe, generate
from shoal.sim.inputs import read_cluster, read_jobs, read_profiles, write_jobs
from shoal.sim.samples import SAMPLES, sample_path

DATA = Path(__file__).parents[3] / "shared" / "data"
FLAT = {"net": Profile.of("net", {1: 1.0, 64: 1.0}), "small": Profile.of("small", {1: 1.0, 4: 1.0})}


def made(recipe: Recipe, seed: int = 0) -> pl.DataFrame:
    return generate(recipe, FLAT, np.random.default_rng(seed))


@settings(max_examples=40, deadline=None)
@given(
    jobs=st.integers(2, 400),
    gpus=st.integers(1, 200),
    load=st.floats(0.05, 3.0),
    arrivals=st.sampled_from(ARRIVALS),
    seed=st.integers(0, 1_000),
)
def test_the_load_is_met_and_every_job_can_run(jobs, gpus, load, arrivals, seed):
    trace = made(Recipe(jobs=jobs, gpus=gpus, load=load, arrivals=arrivals), seed)
    assert trace.height == jobs
    assert trace["submit_s"].is_sorted()
    assert trace["submit_s"][0] == 0
    assert (trace["requested_gpus"] <= np.minimum(gpus, trace["max_gpus"].to_numpy())).all()
    assert (trace["iterations"] >= 1).all()
    # One iteration takes one second here, whatever the share: iterations are seconds.
    work = float(trace["requested_gpus"].to_numpy() @ trace["iterations"].to_numpy())
    span_s = work / (gpus * load)
    assert span_s - 1 <= trace["submit_s"][-1] <= span_s + 1e-6 * span_s


@pytest.mark.parametrize("arrivals", ARRIVALS)
def test_the_same_seed_gives_the_same_trace_and_another_one_does_not(arrivals):
    recipe = Recipe(jobs=500, arrivals=arrivals)
    assert made(recipe, 3).equals(made(recipe, 3))
    assert not made(recipe, 3).equals(made(recipe, 4))


def test_another_arrival_process_leaves_sizes_durations_and_models_alone():
    traces = [made(Recipe(jobs=500, arrivals=arrivals)) for arrivals in ARRIVALS]
    same = ["model", "iterations", "requested_gpus"]
    assert traces[0].select(same).equals(traces[1].select(same))
    assert traces[0].select(same).equals(traces[2].select(same))
    assert len({tuple(trace["submit_s"].to_list()) for trace in traces}) == 3


def gaps_cv(trace: pl.DataFrame) -> float:
    gaps = np.diff(trace["submit_s"].to_numpy().astype(float))
    return float(gaps.std() / gaps.mean())


def test_poisson_gaps_are_exponential_and_bursts_are_not():
    recipe = Recipe(jobs=20_000, gpus=100, load=0.5)
    assert gaps_cv(made(recipe)) == pytest.approx(1.0, abs=0.05)
    assert gaps_cv(made(replace(recipe, arrivals="bursty"))) > 3


def test_diurnal_arrivals_follow_the_hours_of_philly():
    trace = made(Recipe(jobs=60_000, gpus=500, load=0.5, arrivals="diurnal"))
    submit_s = trace["submit_s"].to_numpy()
    assert submit_s[-1] > 21 * DAY_S
    weeks = submit_s[submit_s < submit_s[-1] // (7 * DAY_S) * 7 * DAY_S]
    per_hour = np.bincount((weeks // 3_600 % 24).astype(int), minlength=24) / len(weeks) * 24
    assert np.argmax(per_hour) == 7
    assert per_hour[7] / per_hour[14] == pytest.approx(2.09 / 0.64, rel=0.1)
    per_day = np.bincount((weeks // DAY_S % 7).astype(int), minlength=7) / len(weeks) * 7
    assert per_day[4] / per_day[6] == pytest.approx(1.44 / 0.59, rel=0.1)


def test_users_are_active_by_rank():
    counts = made(Recipe(jobs=50_000, users=("a", "b", "c", "d")))["user"].value_counts()
    share = dict(counts.iter_rows())
    harmonic = 1 + 1 / 2 + 1 / 3 + 1 / 4
    for rank, name in enumerate("abcd", 1):
        assert share[name] / 50_000 == pytest.approx(1 / rank / harmonic, abs=0.01)


def test_a_bursts_jobs_have_one_user():
    trace = made(Recipe(jobs=5_000, gpus=10, load=0.1, arrivals="bursty"))
    gap = np.diff(trace["submit_s"].to_numpy())
    same = trace["user"].to_numpy()[1:] == trace["user"].to_numpy()[:-1]
    close = gap < 60
    assert close.mean() > 0.5
    assert same[close].mean() > 0.9


def test_sizes_too_large_for_the_cluster_or_every_model_are_not_drawn():
    assert set(made(Recipe(jobs=3_000, gpus=5))["requested_gpus"].unique()) == {1, 2, 4}
    only = {"small": FLAT["small"]}
    trace = generate(Recipe(jobs=3_000), only, np.random.default_rng(0))
    assert set(trace["requested_gpus"].unique()) == {1, 2, 4}
    with pytest.raises(ShoalError, match="sizes: no model runs at any of them"):
        made(Recipe(sizes={128: 1.0}))


def test_iterations_take_the_duration_at_the_requested_size():
    fast = {"net": Profile.of("net", {1: 0.1, 64: 0.01})}
    slow = {"net": Profile.of("net", {1: 1.0, 64: 0.1})}
    traces = [generate(Recipe(jobs=200), p, np.random.default_rng(0)) for p in (fast, slow)]
    ratio = traces[0]["iterations"].to_numpy() / traces[1]["iterations"].to_numpy()
    assert ratio == pytest.approx(np.full(200, 10.0))


@pytest.mark.parametrize(
    ("wrong", "part"),
    [
        ({"jobs": 0}, "jobs: a trace needs at least one"),
        ({"jobs": 10**12}, "at most 20,000,000"),
        ({"gpus": 0}, "gpus: a cluster needs at least one"),
        ({"load": 0.0}, "1e-06 to 1000, not 0"),
        ({"load": 1e-300}, "1e-06 to 1000, not 1e-300"),
        ({"load": 1e4}, "1e-06 to 1000, not 10000"),
        ({"load": float("inf")}, "1e-06 to 1000, not inf"),
        ({"load": float("nan")}, "1e-06 to 1000, not nan"),
        ({"arrivals": "burst"}, "did you mean 'bursty'"),
        ({"users": ()}, "users: give at least one"),
        ({"users": ("a", "a")}, "each name once"),
        ({"sizes": {0: 1.0}}, "at least 1 GPU"),
        ({"sizes": {1: float("nan")}}, "sizes: .* no negative shares"),
        ({"longest_s": -1.0}, "longest job: .* more than 1 s"),
    ],
)
def test_a_recipe_that_cannot_be(wrong, part):
    with pytest.raises(ShoalError, match=part):
        Recipe(**wrong)


def test_a_trace_too_long_to_be_read_again_is_not_made():
    with pytest.raises(
        ShoalError, match=r"the last job would come after .* 1e.10 is the most; give fewer jobs"
    ):
        made(Recipe(jobs=1_000, gpus=1, load=1e-6))


@pytest.mark.reference
def test_sizes_and_durations_have_the_shape_of_philly():
    path = DATA / "philly" / "philly.csv"
    if not path.exists():
        pytest.skip(f"the published trace is not in {DATA}")
    philly = pl.read_csv(path).drop_nulls()
    trace = made(Recipe(jobs=1_000_000, gpus=1_000))
    for low, high in ((1, 1), (2, 2), (4, 4), (8, 128)):
        real = philly.filter(pl.col("num_gpus").is_between(low, high))["duration"].to_numpy()
        ours = trace.filter(pl.col("requested_gpus").is_between(low, high))["iterations"].to_numpy()
        assert ks_2samp(real, ours).statistic < 0.05
        assert ours.mean() == pytest.approx(real.mean(), rel=0.1)
    share = trace["requested_gpus"].value_counts(normalize=True)
    assert dict(share.iter_rows()) == pytest.approx(dict(PHILLY_SIZES), rel=0.1)


def test_the_samples_fit_together(tmp_path):
    profiles = read_profiles(sample_path("profiles.csv"))
    cluster = read_cluster(sample_path("cluster.yaml"))
    jobs = read_jobs(sample_path("jobs.csv"), profiles, cluster)
    assert len(jobs) == 300
    assert {job.user for job in jobs} == {user.name for user in cluster.users}
    assert cluster.total_gpus == 64
    assert cluster.gpu_types == ("a100", "v100", "k80")
    assert len(read_jobs(sample_path("jobs.csv"), profiles, Cluster.pool(64))) == 300
    for profile in profiles.values():
        for gpu_type in ("a100", "v100", "k80", "gpu"):
            speed = profile.curve(gpu_type).speed
            assert (np.diff(speed) > 0).all()  # more GPUs are faster,
            assert (
                speed[2:] / np.arange(2, len(speed)) < speed[1] * 1.0001
            ).all()  # never more than linearly
    assert SAMPLES == ("profiles.csv", "jobs.csv", "cluster.yaml")
    with pytest.raises(ShoalError, match=r"did you mean 'jobs\.csv'"):
        sample_path("job.csv")
    write_jobs(tmp_path / "again.csv", pl.read_csv(sample_path("jobs.csv")))
    assert (tmp_path / "again.csv").read_text() == sample_path("jobs.csv").read_text()
