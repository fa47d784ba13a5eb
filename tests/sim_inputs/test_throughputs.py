"""Profiles from the throughputs that come with Gavel's and ElasticFlow's traces."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal.core.errors import InputError
from shoal.sim.importers.elasticflow import elasticflow_profiles
from shoal.sim.importers.gavel import gavel_profiles
from shoal.sim.inputs import profiles_of, read_profiles, write_profiles

from .samples import complaint, damage


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_damage_to_throughputs_is_harmless_or_refused_in_one_line(tmp_path, data):
    gavel = bytearray(b"""{"v100": {"('net', 1)": {"null": 4.0},\n"('net', 4)": {"null": 10.0}}}""")
    elasticflow = bytearray(b"global_batch_size,1,2,4\n64,2.0,,0\n128,1.0,2.0,4.0\n")
    damage(gavel, data)
    damage(elasticflow, data)
    (tmp_path / "speeds.json").write_bytes(gavel)
    (tmp_path / "bert.csv").write_bytes(elasticflow)
    for work in (
        lambda: profiles_of(gavel_profiles(tmp_path / "speeds.json").frame),
        lambda: profiles_of(elasticflow_profiles(tmp_path).frame),
    ):
        said = complaint(work)
        assert said is None or (said.startswith(str(tmp_path)) and len(said.splitlines()) == 1)


def test_gavel_throughputs_become_profiles(tmp_path):
    path = tmp_path / "throughputs.json"
    path.write_text(json.dumps({
        "v100": {"('net', 1)": {"null": 4.0, "('net', 1)": [2.0, 2.0]}, "('net', 4)": {"null": 10.0}},
        "v100_unconsolidated": {"('net', 1)": {"null": 4.0}, "('net', 4)": {"null": 5.0}},
        "k80": {"('net', 1)": {"null": 1.0}, "('net', 4)": {"null": 0.0}},
    }))  # fmt: skip
    speeds = gavel_profiles(path)
    frame = speeds.frame
    assert speeds.notes == ("1 throughputs are 0: no profile at these sizes",)
    write_profiles(tmp_path / "profiles.csv", frame)
    for profiles in (profiles_of(frame), read_profiles(tmp_path / "profiles.csv")):
        net = profiles["net"]
        assert [net.speed("v100", 4), net.speed("v100", 4, nodes=4), net.speed("k80", 4)] == [10, 5, 0]
    path.write_text("[]")
    with pytest.raises(InputError, match="not a table of Gavel's throughputs"):
        gavel_profiles(path)


@pytest.mark.parametrize(
    ("text", "field", "part"),
    [
        ("""{"v100": {"('net', 1)": {"null": NaN}}}""", "v100 ('net', 1)", "nan is not a number of steps"),
        (
            """{"v100": {"('net', 1)": {"null": Infinity}}}""",
            "v100 ('net', 1)",
            "inf is not a number of steps",
        ),
        ("""{"v100": {"('net', 1)": {"null": 1e-320}}}""", "v100 ('net', 1)", "is not a number of steps"),
        ("""{"v100": {"('net', 1)": {"null": 2e9}}}""", "v100 ('net', 1)", "0 or 1e-09 to 1e+09; measure"),
        ("""{"v100": {"('net', 1)": {"null": "4"}}}""", "v100 ('net', 1)", "4 is not a number of steps"),
        ("""{"v100": {"('net', 1)": {"nil": 4}}}""", "v100 ('net', 1)", "no speed"),
        ("""{"v100": {"('net', 0)": {"null": 4}}}""", "v100", "not a pair of model and GPUs"),
        ("""{"v100": {"net": {"null": 4}}}""", "v100", "not a pair of model and GPUs"),
        ("""{"v100": {"('net', 1)": {"null": 4, "null": 5}}}""", "null", "twice"),
        ("""{"v100": {"('net', 1)": {"null": 0}}}""", None, "no throughput above 0"),
        ("""{"v100": {"('net', 1)": {"null": 4}""", None, "cut off"),
        ("{}", None, "not a table of Gavel's throughputs"),
    ],
)
def test_a_speed_that_is_none_in_gavels_throughputs_is_named(tmp_path, text, field, part):
    path = tmp_path / "throughputs.json"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        gavel_profiles(path)
    assert (caught.value.file, caught.value.field) == (str(path), field)
    assert part in str(caught.value)


@pytest.mark.parametrize(
    ("text", "line", "field", "part"),
    [
        ("global_batch_size,1,2\n64,2.0,3\n128,1.0,abc\n", 3, "2", "'abc' is not a number"),
        ("global_batch_size,1,2\n64,nan,3\n", 2, "1", "finite"),
        ("global_batch_size,1,2\n64,-1,3\n", 2, "1", "negative"),
        ("global_batch_size,1,2\n64,1e-310,3\n", 2, "1", "must be 1e-09 to 1e+09, not 1e-310"),
        ("global_batch_size,1,2\n64,1,2e9\n", 2, "2", "must be 1e-09 to 1e+09, not 2e9"),
        ("global_batch_size,1,2\n64,1,3\n64,1,3\n", 3, "global_batch_size", "already occurs"),
        ("global_batch_size,0,2\n64,1,3\n", 1, "0", "not a number of GPUs"),
        ("global_batch_size,one\n64,1\n", 1, None, "no column is a number of GPUs"),
        ("global_batch_size,1\n64,0\n", None, None, "no throughput above 0"),
    ],
)
def test_a_cell_that_is_no_speed_in_elasticflows_throughputs_is_named(tmp_path, text, line, field, part):
    (tmp_path / "bert.csv").write_text(text)
    with pytest.raises(InputError) as caught:
        elasticflow_profiles(tmp_path)
    assert (caught.value.line, caught.value.field) == (line, field)
    assert part in str(caught.value)


def test_sizes_without_a_throughput_have_no_profile_and_zeros_are_told(tmp_path):
    (tmp_path / "bert.csv").write_text("global_batch_size,1,2,4\n64,2.0,,0\n128,1.0,2.0,4.0\n")
    speeds = elasticflow_profiles(tmp_path)
    assert profiles_of(speeds.frame)["bert-64"].speed("gpu", 2) == 0
    assert profiles_of(speeds.frame)["bert-128"].speed("gpu", 4) == 4
    assert speeds.notes == ("1 throughputs are 0: no profile at these sizes",)


@pytest.mark.parametrize("head", ["{\n" + " \n" * 40_000, "\0", "hello\n"])
def test_a_huge_file_is_no_table_of_throughputs_and_is_not_read(tmp_path, monkeypatch, head):
    path = tmp_path / "throughputs.csv"
    with path.open("w") as file:
        file.write(head)
        file.truncate(1 << 30)  # sparse: a gigabyte that takes no room
    monkeypatch.setattr(Path, "read_text", lambda *a, **k: pytest.fail("the file was read"))
    monkeypatch.setattr(pl, "read_csv", lambda *a, **k: pytest.fail("the file was read"))
    with pytest.raises(InputError, match="throughputs"):
        gavel_profiles(path)
    with pytest.raises(InputError, match=r"throughputs|this column is missing|binary"):
        elasticflow_profiles(tmp_path)


def test_a_huge_csv_with_the_right_header_is_no_table_of_throughputs_either(tmp_path, monkeypatch):
    with (tmp_path / "bert.csv").open("w") as file:
        file.write("global_batch_size,1,2\n" + "64,1,2\n" * 20_000)
        file.truncate(1 << 30)
    monkeypatch.setattr(pl, "read_csv", lambda *a, **k: pytest.fail("the file was read"))
    with pytest.raises(InputError, match="too large for a table of throughputs"):
        elasticflow_profiles(tmp_path)
