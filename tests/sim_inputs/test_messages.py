"""The words of errors and summaries: values as they stand in the file, all that is known, and numbers that fit."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

from shoal.cli.sim_summary import show_jobs
from shoal.core.cluster import Cluster
from shoal.core.errors import InputError
from shoal.core.profile import Profile
from shoal.sim.inputs import read_cluster, read_jobs, read_profiles
from shoal.sim.inputs.placements_file import measured_profiles

PROFILES = {"net": Profile.of("net", {1: 1.0, 8: 0.2})}
JOBS = "submit_s,model,iterations,requested_gpus,max_gpus\n"
ALL = "placement,local_bsz,step_time,sync_time"
KNOWN = "known: placement, local_bsz, step_time, sync_time"
SPEEDS = "model,gpus,seconds_per_iteration,servers\n"


def refused(tmp_path, text, read) -> InputError:
    path = tmp_path / "file"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        read(path)
    assert caught.value.file == str(path)
    return caught.value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0,net,1e400,1,1\n", "iterations: must be finite, not 1e400"),
        ("0,net,-0.00,1,1\n", "iterations: must be above 0, not -0.00"),
        ("-3.10,net,1,1,1\n", "submit_s: must not be negative, not -3.10"),
        ("20000000000,net,1,1,1\n", "submit_s: must be 0 to 1e+10, not 20000000000; check its unit"),
        (
            "0,net,1,1,99999999999999999999\n",
            "max_gpus: 99999999999999999999 is more than 1,000,000; check the number",
        ),
        ("0,net,1,-0,1\n", "requested_gpus: must be at least 1, not -0"),
        (
            "1234567.5,net,1,1,1\n1234567.25,net,1,1,1\n",
            "submit_s: 1234567.25 is before the job above it (1234567.5); sort the file by submit_s",
        ),
        ("0,net,1,1," + "9" * 60 + "\n", "max_gpus: " + "9" * 39 + "… is more than 1,000,000; check the number"),
    ],
    ids=[
        "beyond all numbers", "a zero with a sign", "below 0", "a unit too small", "twenty digits", "no GPU",
        "times that differ in the last digit", "sixty digits",
    ],
)  # fmt: skip
def test_an_error_shows_a_number_as_it_stands_in_the_trace(tmp_path, text, message):
    error = refused(tmp_path, JOBS + text, lambda path: read_jobs(path, PROFILES, Cluster.pool(8)))
    assert f"{error.field}: {error.message}" == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nodes: [{gpus: 99999999999999999999}]", "at most 1,000,000, not 99999999999999999999"),
        ("nodes: [{gpus: 1}]\nusers: {ada: -0.10}", "must be a positive number, not -0.10"),
        ("nodes: [{gpus: 1}]\nusers: {ada: .inf}", "must be a positive number, not .inf"),
    ],
    ids=["twenty digits", "below 0", "YAML's infinity"],
)
def test_an_error_shows_a_number_as_it_stands_in_the_cluster(tmp_path, text, message):
    assert refused(tmp_path, text, read_cluster).message.endswith(message)


@pytest.mark.parametrize(
    ("header", "field", "told"),
    [
        ("placement,local_bsz,num_nodes", "num_nodes", KNOWN),
        ("local_bsz,step_time,sync_time,num_nodes", "num_nodes", KNOWN),
        ("placement,local_bsz,step_times", "step_times", "did you mean 'step_time'?"),
        (ALL + ",step_times", "step_times", KNOWN),
    ],
    ids=["some are missing", "one is missing", "near one that is missing", "near one that is there"],
)  # fmt: skip
def test_an_unknown_column_is_told_what_columns_there_are(tmp_path, header, field, told):
    error = refused(tmp_path, f"{header}\n1,1,1,1\n", lambda path: measured_profiles([("net", path, 1.0)]))
    assert (error.line, error.field, error.message) == (1, field, f"unknown column; {told}")


@pytest.mark.parametrize(
    ("pairs", "told"),
    [
        ("m,1,1,1\n", None),
        ("m,1,1,1\nm,2,0.6,1\nm,1,0.9,2\nm,2,0.5,2\n", None),
        ("m,1,1,1\nm,2,0.6,2\nm,3,0.5,3\nm,1,0.9,2\nm,2,0.7,1\n", None),
        ("m,2,0.6,2\n", "'m' was measured with 1 pair of servers and GPUs, too few to predict others; "
         "measure 5 or more, or all 4 up to 2 servers and 2 GPUs"),
        ("m,1,1,1\nm,2,0.6,2\nm,3,0.5,3\nm,1,0.9,2\n", "'m' was measured with 4 pairs of servers and GPUs, "
         "too few to predict others; measure 5 or more, or all 9 up to 3 servers and 3 GPUs"),
    ],
    ids=["the only pair", "all pairs of a small square", "five of nine", "one of four", "four of nine"],
)  # fmt: skip
def test_a_model_with_servers_needs_all_its_pairs_or_five(tmp_path, pairs, told):
    text = SPEEDS + "plain,1,1,\n" + pairs
    if told is None:
        path = tmp_path / "profiles.csv"
        path.write_text(text)
        assert (read_profiles(path)["m"].by_servers > 0).all()
    else:
        error = refused(tmp_path, text, read_profiles)
        assert (error.line, error.field, error.message) == (3, "servers", told)


@pytest.mark.parametrize(
    ("last_s", "users", "lines"),
    [
        (None, ["ada"], ["1  job written to jobs.csv", "1  model; jobs by GPUs requested: 1: 100.0%", "1  user"]),
        (0, ["ada"], ["2  jobs written to jobs.csv", "0.0  seconds from the first to the last"]),
        (90, ["ada", "ben"], ["1.5  minutes from the first to the last", "2  users"]),
        (7200, ["ada"], ["2.0  hours from the first to the last"]),
        (216_000, ["ada"], ["2.5  days from the first to the last"]),
    ],
    ids=["one job", "two at once", "a minute and a half", "two hours", "days"],
)  # fmt: skip
def test_the_summary_of_a_trace_has_the_words_for_its_numbers(capsys, last_s, users, lines):
    submit_s = [0] if last_s is None else [0, last_s]
    rows = {"submit_s": submit_s, "model": "net", "requested_gpus": 1}
    jobs = pl.DataFrame(rows).with_columns(user=pl.Series(users * len(submit_s))[: len(submit_s)])
    show_jobs(Path("jobs.csv"), jobs)
    said = [" ".join(line.split()) for line in capsys.readouterr().err.splitlines()]
    assert {" ".join(line.split()) for line in lines} <= set(said) | {s.split(";")[0] for s in said}
    assert last_s is not None or not any("first to the last" in line for line in said)


def test_a_size_that_is_rare_is_not_said_to_be_absent(capsys):
    rows = {"submit_s": 0, "model": "net", "requested_gpus": [1] * 4999 + [12]}
    show_jobs(Path("jobs.csv"), pl.DataFrame(rows))
    assert "1: 100.0%, 12: below 0.1%" in " ".join(capsys.readouterr().err.split())
