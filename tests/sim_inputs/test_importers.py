"""Published formats: a small sample of each, what becomes of every row, and what is said of bad ones."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal.core.cluster import Cluster
from shoal.core.errors import InputError, ShoalError
from shoal.core.profile import Profile
from shoal.sim.importers import FORMATS, Wishes, convert, format_named
from shoal.sim.inputs import read_jobs, read_profiles, write_jobs, write_profiles
from shoal.sim.inputs.model_pool import ModelPool, assign_models

from .samples import ONE, SAMPLES, complaint, damage

DATA = Path(__file__).parents[3] / "shared" / "data"
LEFT_OUT = {
    "philly": {"never ran": 1, "ran for no time": 1},
    "helios": {"used no GPU": 1},
    "alibaba-pai": {"not finished": 1, "used no GPU": 1},
    "gavel": {"used no GPU": 1},
}


@pytest.fixture(params=sorted(SAMPLES))
def sample(request, tmp_path) -> tuple[str, Path]:
    path = tmp_path / "trace"
    path.write_text(SAMPLES[request.param])
    return request.param, path


def test_every_format_has_a_sample():
    assert SAMPLES.keys() == FORMATS.keys()


def test_each_sample_gives_a_20_second_and_a_90_second_job_two_minutes_apart(sample):
    name, path = sample
    result = convert(format_named(name).read(path), ONE)
    jobs = result.jobs
    assert jobs["submit_s"].to_list() == [0, 100 if name == "alibaba-pai" else 120]
    assert jobs["requested_gpus"].to_list() == [1, 2]
    assert jobs["iterations"].to_list() == [40, 360]  # 20 s at 0.5 s and 90 s at 0.25 s each
    assert jobs["max_gpus"].to_list() == [8, 8]
    assert dict(result.left_out) == LEFT_OUT.get(name, {})
    assert not result.bad


def test_the_result_can_be_read_back_as_csv_and_as_parquet(sample, tmp_path):
    name, path = sample
    jobs = convert(format_named(name).read(path), ONE).jobs
    for out in (tmp_path / "jobs.csv", tmp_path / "jobs.parquet"):
        write_jobs(out, jobs)
        read = read_jobs(out, ONE, Cluster.pool(4))
        assert [job.iterations for job in read] == [40, 360]
        assert [str(job.gpus) for job in read] == ["1..4", "1..4"]


def test_users_are_those_of_the_trace_or_its_virtual_clusters(sample):
    name, path = sample
    jobs = convert(format_named(name).read(path), ONE).jobs
    users = {"philly": ["ann", "ann"], "philly-csv": ["y", "x"], "helios": ["ann", "ann"]}.get(name)
    assert (jobs["user"].to_list() if "user" in jobs.columns else None) == users


def test_one_virtual_cluster_can_be_taken_out(sample):
    name, path = sample
    trace = format_named(name).read(path)
    if name not in ("philly", "philly-csv", "helios"):
        with pytest.raises(InputError, match="no virtual clusters"):
            convert(trace, ONE, Wishes(vcs=("x",)))
        return
    result = convert(trace, ONE, Wishes(vcs=("x",)))
    assert result.jobs["requested_gpus"].to_list() == [2]
    assert dict(result.left_out) == {"of other virtual clusters": trace.rows - 1}
    with pytest.raises(InputError, match="no job belongs to cluster 'z'; known: x, y"):
        convert(trace, ONE, Wishes(vcs=("z",)))


def philly_job(vc: str, gpus: int, ran_s: int) -> dict[str, object]:
    detail = [{"ip": "m1", "gpus": [f"gpu{i}" for i in range(gpus)]}]
    times = {"start_time": "2017-10-09 07:00:00", "end_time": f"2017-10-09 07:00:0{ran_s}"}
    return {"vc": vc, "submitted_time": times["start_time"], "attempts": [{**times, "detail": detail}]}


#: Cluster, GPUs and seconds of jobs: no job of q ran, r has one of each kind.
MIXED = [("q", 1, 0), ("r", 1, 0), ("r", 0, 9), ("r", 1, 9)]
CLUSTERS = {
    "philly": json.dumps([philly_job(*job) for job in MIXED]),
    "philly-csv": "timestamp,duration,num_gpus,cluster\n"
    + "".join(f"2017-10-09 07:00:00,{ran_s},{gpus},{vc}\n" for vc, gpus, ran_s in MIXED),
    "helios": "job_id,user,vc,gpu_num,submit_time,duration\n"
    + "".join(
        f"{i},ann,{vc},{gpus},2017-10-09 07:00:00,{ran_s}\n" for i, (vc, gpus, ran_s) in enumerate(MIXED)
    ),
}


@pytest.mark.parametrize("name", CLUSTERS)
@pytest.mark.parametrize(
    ("vcs", "left_out"),
    [
        ((), {"ran for no time": 2, "used no GPU": 1}),
        (("r",), {"ran for no time": 1, "used no GPU": 1, "of other virtual clusters": 1}),
        (("q", "r"), {"ran for no time": 2, "used no GPU": 1}),
    ],
    ids=["all clusters", "one cluster", "both clusters by name"],
)
def test_what_is_left_out_is_counted_within_the_clusters_chosen(tmp_path, name, vcs, left_out):
    path = tmp_path / "trace"
    path.write_text(CLUSTERS[name])
    result = convert(format_named(name).read(path), ONE, Wishes(vcs=vcs))
    assert dict(result.left_out) == left_out
    assert result.jobs.height == 1


@pytest.mark.parametrize("name", CLUSTERS)
def test_a_cluster_in_which_nothing_ran_is_known_and_has_no_job_to_write(tmp_path, name):
    path = tmp_path / "trace"
    path.write_text(CLUSTERS[name])
    trace = format_named(name).read(path)
    with pytest.raises(InputError, match="no job belongs to cluster 'z'; known: q, r"):
        convert(trace, ONE, Wishes(vcs=("z",)))
    nothing = r"no job is left to write: 1 ran for no time; 3 of other virtual clusters"
    with pytest.raises(InputError, match=nothing):
        convert(trace, ONE, Wishes(vcs=("q",)))


#: Format, a row or record that is wrong, the field named, and a part of the message.
SPOILT: list[tuple[str, str, str, str | None, str]] = [
    ("philly-csv", "2017-10-09 06:58:00,20.0", "yesterday,20.0", "timestamp", "'yesterday' is not a time"),
    ("philly-csv", "20.0,1,20.0,y", "-20.0,1,20.0,y", "duration", "negative"),
    ("philly-csv", "20.0,1,20.0,y", "20.0,0.5,20.0,y", "num_gpus", "whole number"),
    ("philly-csv", "20.0,1,20.0,y", "20.0,1", None, "3 fields, the header has 5"),
    ("helios", "2020-06-09 18:58:20,20,0", "2020-06-09 18:58:20,inf,0", "duration", "finite"),
    ("helios", "7,ann,y,1", "7,ann,y,one", "gpu_num", "'one' is not a whole number"),
    ("helios", "7,ann,y,1", "7,ann,y,-1", "gpu_num", "at least 0"),
    ("helios", "7,ann,y,1", "7,ann,y,9999999999", "gpu_num", "more than 1,000,000"),
    ("gavel", "5.000000\t1", "5.000000\t9999999999", "scale_factor", "more than 1,000,000"),
    ("alibaba-pai", "j1,worker,1.0", "j1,worker,1e30", "plan_gpu", "more than 1,000,000"),
    ("alibaba-pai", "1000.0,1020.0", "-1e308,1020.0", "start_time", "number of seconds"),
    ("alibaba-pai", "1000.0,1020.0", "1000.0,20.0", "end_time", "before start_time"),
    ("alibaba-pai", "1000.0,1020.0", "soon,1020.0", "start_time", "number of seconds"),
    ("gavel", "\t40\t", "\tforty\t", "total_steps", "'forty' is not a number"),
    ("tiresias", "0,1,30,", "0,1,nan,", "submit_time", "finite"),
    ("elasticflow", "64,1,20", "64,,20", "num_gpu", "missing"),
    (
        "philly",
        '"submitted_time": "2017-10-09 06:58:00"',
        '"submitted_time": "then"',
        "submitted_time",
        '"then" is not a time such as',
    ),
    ("philly", '"submitted_time": "2017-10-09 06:58:00"', '"when": 0', "submitted_time", "missing"),
    (
        "philly",
        '"end_time": "2017-10-09 06:58:20"',
        '"end_time": "2017-10-09 05:00:00"',
        "end_time",
        "before it starts",
    ),
    ("philly", '"jobid": "d"', '"jobid": ["d"]', "jobid", '["d"] is not a name'),
]


@pytest.mark.parametrize(("name", "old", "new", "field", "part"), SPOILT)
def test_a_malformed_row_stops_the_import_and_can_be_skipped(tmp_path, name, old, new, field, part):
    path = tmp_path / "trace"
    assert SAMPLES[name].count(old) == 1
    path.write_text(SAMPLES[name].replace(old, new))
    trace = format_named(name).read(path)
    with pytest.raises(InputError) as caught:
        convert(trace, ONE)
    error = caught.value
    where = SAMPLES[name].split(old)[0].count("\n") + 1
    assert error.line == (None if name == "philly" else where)  # JSON has records, no lines to go to
    assert ("record 4: " in str(error)) == (name == "philly")
    assert error.field == field
    assert part in str(error)
    assert f"1 of {trace.rows} {'records' if name == 'philly' else 'rows'}" in str(error)
    assert "--skip-bad" in str(error)
    assert "\n" not in str(error)
    result = convert(trace, ONE, Wishes(skip_bad=True))
    assert len(result.bad) == 1
    assert result.jobs["iterations"].to_list() == [360]


def test_many_malformed_rows_are_counted_and_the_first_ones_listed(tmp_path):
    path = tmp_path / "trace"
    path.write_text("num_gpu,submit_time,duration\n" + "1,1,1\n" * 3 + "x,1,1\n" * 10 + "1,1,1\n")
    with pytest.raises(
        InputError, match=r"10 of 14 rows cannot be used; more on lines 6, 7, 8, 9, and so on"
    ):
        convert(format_named("tiresias").read(path), ONE)


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [("philly", '"jobid": "d"', '"jobid": "a"'), ("helios", "\n7,", "\n9,"), ("tiresias", "\n0,", "\n1,")],
)
def test_names_that_are_not_unique_are_left_out_and_that_is_told(tmp_path, name, old, new):
    path = tmp_path / "trace"
    assert SAMPLES[name].count(old) == 1
    path.write_text(SAMPLES[name].replace(old, new))
    result = convert(format_named(name).read(path), ONE)
    assert "job" not in result.jobs.columns
    assert len(result.notes) == 1
    assert result.notes[0].startswith("2 jobs share their name with another")


@pytest.mark.parametrize("new", ["null", '""', '" "'])
def test_a_philly_job_without_name_and_user_is_of_user_unknown_and_that_is_told(tmp_path, new):
    path, out = tmp_path / "trace", tmp_path / "jobs.csv"
    text = SAMPLES["philly"].replace('"jobid": "d"', f'"jobid": {new}')
    path.write_text(
        text[: text.index(new)] + text[text.index(new) :].replace('"user": "ann"', f'"user": {new}')
    )
    result = convert(format_named("philly").read(path), ONE)
    assert result.jobs["user"].to_list() == ["unknown", "ann"]
    assert result.jobs["job"].to_list() == ["job1", "a"]
    assert [note[:17] for note in result.notes] == ["1 jobs name no us", "1 jobs have no na"]
    write_jobs(out, result.jobs)
    assert [job.user for job in read_jobs(out, ONE, Cluster.pool(4))] == ["unknown", "ann"]


def test_a_name_given_by_place_that_another_job_has_leaves_all_names_out(tmp_path):
    path, out = tmp_path / "trace", tmp_path / "jobs.csv"
    path.write_text(SAMPLES["philly"].replace('"jobid": "d"', '"jobid": null').replace('"a"', '"job1"', 1))
    result = convert(format_named("philly").read(path), ONE)
    assert "job" not in result.jobs.columns
    write_jobs(out, result.jobs)
    assert len(read_jobs(out, ONE, Cluster.pool(4))) == 2


#: The same two jobs in each of Gavel's forms; the second has priority 2 where the form has one.
GAVEL_FORMS = {
    7: "net\tpython main.py\t--steps\t1\t40\t5.0\t1\nnet\tpython main.py\t--steps\t0\t360\t125.0\t2\n",
    9: "net\tpython main.py\t--steps\t1\t40\t1\t1\t-1.0\t5.0\n"
    "net\tpython main.py\t--steps\t0\t360\t2\t2\t-1.0\t125.0\n",
    10: "net\tpython main.py\tnets/one\t--steps\t1\t40\t1\t1\t-1.0\t5\n"
    "net\tpython main.py\tnets/one\t--steps\t0\t360\t2\t2\t-1.0\t125\n",
}


@pytest.mark.parametrize("fields", GAVEL_FORMS)
def test_every_form_of_a_gavel_line_gives_the_same_jobs(tmp_path, fields):
    path = tmp_path / "trace"
    path.write_text(GAVEL_FORMS[fields])
    jobs = convert(format_named("gavel").read(path), ONE).jobs
    assert jobs.select("submit_s", "iterations", "requested_gpus").rows() == [(0, 40, 1), (120, 360, 2)]
    assert fields == 7 or jobs["weight"].to_list() == [1, 2]


def test_a_gavel_line_of_another_length_is_refused(tmp_path):
    path = tmp_path / "trace"
    path.write_text("net\t" * 7 + "1\n")
    with pytest.raises(InputError, match=r"trace:1: .* 7, 9 or 10 fields separated by tabs, this one 8"):
        format_named("gavel").read(path)


def test_gavel_jobs_with_priority_0_are_refused_and_unknown_models_get_a_suggestion(tmp_path):
    path = tmp_path / "trace"
    nine = "{}\tpython main.py\t--steps\t1\t40\t1\t{}\t-1\t5.0\n"
    path.write_text(nine.format("net", 1) + nine.format("net", 0))
    with pytest.raises(InputError, match=r"trace:2: priority_weight: must be above 0, not 0"):
        convert(format_named("gavel").read(path), ONE)
    path.write_text(nine.format("nett", 1))
    with pytest.raises(
        InputError, match=r"trace:1: job_type: no profile for model 'nett'; did you mean 'net'\?"
    ) as e:
        convert(format_named("gavel").read(path), ONE)
    assert "--assign" not in str(e.value)  # it counts steps: no other model could do them
    with pytest.raises(InputError, match="omit --assign"):
        convert(format_named("gavel").read(path), ONE, Wishes(assign=True))


def test_parquet_traces_are_told_by_rows_and_may_hold_real_times(tmp_path):
    path = tmp_path / "trace.parquet"
    frame = pl.DataFrame(
        {
            "timestamp": ["2017-10-09 07:00:00", "2017-10-09 06:58:00"],
            "duration": [90.0, 20.0],
            "num_gpus": [2, -1],
        }
    )
    frame.write_parquet(path)
    with pytest.raises(InputError, match=r"trace.parquet: num_gpus: row 2: must be at least 0"):
        convert(format_named("philly-csv").read(path), ONE)
    frame.with_columns(num_gpus=pl.Series([2, 0])).write_parquet(path)
    assert format_named("philly-csv").read(path).left_out == {"used no GPU": 1}
    good = frame.with_columns(pl.col("timestamp").str.to_datetime(), num_gpus=pl.Series([2, 1]))
    good.write_parquet(path)
    assert convert(format_named("philly-csv").read(path), ONE).jobs["submit_s"].to_list() == [0, 120]
    good.with_columns(pl.col("timestamp").dt.date()).write_parquet(path)
    with pytest.raises(InputError, match="timestamp: contains Date, not dates with times"):
        format_named("philly-csv").read(path)


def test_a_model_without_a_profile_is_bad_unless_models_are_drawn(tmp_path):
    path = tmp_path / "trace"
    path.write_text(SAMPLES["tiresias"].replace("606,net", "606,other"))
    trace = format_named("tiresias").read(path)
    with pytest.raises(InputError, match=r":2: model_name: no profile for model 'other'.*--assign"):
        convert(trace, ONE)
    assert convert(trace, ONE, Wishes(assign=True)).jobs["model"].to_list() == ["net", "net"]


def test_jobs_that_fit_no_model_or_do_no_whole_iteration_are_counted(tmp_path):
    path = tmp_path / "trace"
    path.write_text("num_gpu,submit_time,duration\n1,0,10\n9,0,10\n1,0,0.3\n1,0,0\n4,0,10\n")
    result = convert(format_named("tiresias").read(path), ONE, Wishes(gpus=8))
    assert dict(result.left_out) == {
        "ran for no time": 1,
        "asked for more than 8 GPUs": 1,
        "would do less than one iteration": 1,
    }
    assert result.jobs.height == 2
    big = convert(format_named("tiresias").read(path), ONE)
    assert big.left_out["asked for more GPUs than any model runs on"] == 1


@pytest.mark.parametrize(
    ("submit", "duration", "why"),
    [
        ("1e10", "10", None),
        ("1.01e10", "10", "came more than 1e+10 s after the first"),
        ("1e300", "10", "came more than 1e+10 s after the first"),
        ("0", "1e308", "would do more iterations than can be counted"),
    ],
)
def test_numbers_beyond_measure_are_left_out_and_counted(tmp_path, submit, duration, why):
    path, out = tmp_path / "trace", tmp_path / "jobs.csv"
    path.write_text(f"num_gpu,submit_time,duration\n1,0,10\n1,{submit},{duration}\n")
    result = convert(format_named("tiresias").read(path), ONE)
    assert dict(result.left_out) == ({why: 1} if why else {})
    write_jobs(out, result.jobs)
    assert len(read_jobs(out, ONE, Cluster.pool(4))) == (1 if why else 2)


def test_profiles_are_written_as_fine_as_they_are(tmp_path):
    """A fast model does 10 million iterations per second; six decimals would make it 0 seconds each."""
    out = tmp_path / "profiles.csv"
    frame = pl.DataFrame({"model": ["net", "net"], "gpus": [1, 2], "seconds_per_iteration": [1e-7, 1 / 3e7]})
    write_profiles(out, frame)
    assert read_profiles(out)["net"].speed("gpu", 2) == pytest.approx(3e7, rel=1e-5)


def test_a_trace_of_which_all_rows_are_malformed_says_so(tmp_path):
    path = tmp_path / "trace"
    path.write_text("num_gpu,submit_time,duration\nx,0,10\n")
    with pytest.raises(
        InputError, match=r"no job is left to write: 1 malformed \('x' is not a whole number\)"
    ):
        convert(format_named("tiresias").read(path), ONE, Wishes(skip_bad=True))


def test_a_trace_of_which_nothing_is_left_says_why(tmp_path):
    path = tmp_path / "trace"
    path.write_text("num_gpu,submit_time,duration\n9,0,10\n")
    with pytest.raises(InputError, match="no job is left to write: 1 asked for more GPUs"):
        convert(format_named("tiresias").read(path), ONE)


@pytest.mark.parametrize("name", sorted(FORMATS))
@pytest.mark.parametrize("content", [b"", b"\0\1\2\3" * 100, b"hello world\n", b'{"a": 1}\n', b"[1, 2]"])
def test_a_file_of_another_kind_is_refused_in_one_line(tmp_path, name, content):
    path = tmp_path / "trace"
    path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        convert(format_named(name).read(path), ONE)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)
    with pytest.raises(InputError, match="no such file"):
        format_named(name).read(tmp_path / "nowhere")


@pytest.mark.parametrize("name", sorted(FORMATS))
@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_damage_is_harmless_or_refused_in_one_line(tmp_path, name, data):
    path = tmp_path / "trace"
    content = bytearray(SAMPLES[name].encode())
    damage(content, data)
    path.write_bytes(content)
    said = complaint(lambda: convert(format_named(name).read(path), ONE, Wishes(skip_bad=True)))
    assert said is None or (said.startswith(str(path)) and len(said.splitlines()) == 1)


def test_an_unknown_format_gets_a_suggestion():
    with pytest.raises(ShoalError, match="did you mean 'helios'"):
        format_named("helois")


def test_models_are_drawn_as_by_one_draw_after_the_other():
    """The vectorised assignment consumes numpy's legacy stream exactly as the authors' loop does."""
    profiles = {f"m{top}": Profile.of(f"m{top}", {1: 1.0, top: 0.5}) for top in (8, 20, 52, 28, 4)}
    pool = ModelPool.of(profiles)
    requested = np.random.default_rng(5).choice([1, 2, 4, 8, 16, 32, 64], 3_000)
    rng = np.random.RandomState(0)
    fast = assign_models(requested, pool, lambda below: rng.randint(0, below))
    loop = np.random.RandomState(0)
    for gpus, index in zip(requested.tolist(), fast.tolist()):
        fits = [i for i, curve in enumerate(pool.curves) if curve.max_gpus >= gpus]
        assert index == (fits[loop.choice(len(fits))] if fits else -1)


def test_models_without_a_speed_on_the_type_wished_for_are_told(tmp_path):
    path = tmp_path / "trace"
    path.write_text(SAMPLES["tiresias"])
    typed = {
        "net": Profile.from_rows("net", [("v100", 1, 0, 1.0), ("v100", 8, 0, 0.2)]),
        "old": Profile.from_rows("old", [("k80", 1, 0, 1.0), ("k80", 8, 0, 0.2)]),
    }
    trace = format_named("tiresias").read(path)
    result = convert(trace, typed, Wishes(gpu_type="v100"))
    assert result.notes == ("not used, as they have no speed on v100: old",)
    with pytest.raises(InputError, match="model_name: 'net' has no speed on GPUs of type 'k80'"):
        convert(trace, typed, Wishes(gpu_type="k80"))
    with pytest.raises(ShoalError, match="did you mean 'v100'"):
        convert(trace, typed, Wishes(gpu_type="v10"))
    with pytest.raises(ShoalError, match="--gpu-type v100: the profiles do not distinguish GPU types"):
        convert(trace, ONE, Wishes(gpu_type="v100"))


def test_steps_of_a_trace_are_kept_where_they_run_on_the_type_wished_for_or_on_any(tmp_path):
    path = tmp_path / "trace"
    path.write_text(SAMPLES["gavel"])
    typed = {"net": Profile.from_rows("net", [("v100", 1, 0, 1.0), ("v100", 8, 0, 0.2), ("k80", 1, 0, 2.0)])}
    trace = format_named("gavel").read(path)
    for gpu_type, sizes in ((None, [1, 2]), ("v100", [1, 2]), ("k80", [1])):
        result = convert(trace, typed, Wishes(gpu_type=gpu_type))
        assert result.jobs["requested_gpus"].to_list() == sizes
        assert result.left_out.get("asked for a size their model has no speed for", 0) == 2 - len(sizes)


@pytest.mark.reference
@pytest.mark.parametrize("vc", ["2869ce", "ed69ec", "103959"])
def test_the_afs_recipe_reproduces_the_published_inputs(vc):
    if not (DATA / "philly" / "philly.csv").exists():
        pytest.skip(f"the published traces are not in {DATA}")
    trace = format_named("philly-csv").read(DATA / "philly" / "philly.csv")
    jobs = convert(trace, read_profiles(DATA / "afs" / "profiles.csv"), Wishes(vcs=(vc,))).jobs
    expected = pl.read_csv(DATA / "afs" / f"jobs-{vc}.csv")
    assert jobs.height == expected.height
    for column in ("submit_s", "model", "requested_gpus", "max_gpus"):
        assert jobs[column].to_list() == expected[column].to_list()
    # The published file has six decimals.
    assert np.abs(jobs["iterations"].to_numpy() - expected["iterations"].to_numpy()).max() < 1e-6
