"""Every way a file can be wrong is one line that names the file, the line and the field."""

from __future__ import annotations

import os
from datetime import date, datetime
from pathlib import Path

import polars as pl
import pytest

from shoal.core.cluster import Cluster, Node, User
from shoal.core.errors import InputError, ShoalError
from shoal.core.profile import Profile
from shoal.sim.importers import format_named
from shoal.sim.inputs import read_cluster, read_jobs, read_profiles, write_aside

PROFILES = {
    "alpha": Profile.of("alpha", {1: 1.0, 4: 0.3, 8: 0.2}),
    "beta": Profile.of("beta", {2: 1.0, 16: 0.2}),
    "gamma": Profile.from_rows("gamma", [("v100", 1, 0, 1.0), ("v100", 8, 0, 0.2)]),
}
POOL = Cluster.pool(12)
HEADER = "submit_s,model,iterations,requested_gpus,max_gpus"
GOOD = "0,alpha,100,1,8"


def fails(path: Path, cluster: Cluster = POOL) -> InputError:
    with pytest.raises(InputError) as caught:
        read_jobs(path, PROFILES, cluster)
    assert "\n" not in str(caught.value)
    assert caught.value.file == str(path)
    return caught.value


def trace(tmp_path: Path, *lines: str, header: str = HEADER, end: str = "\n") -> Path:
    path = tmp_path / "jobs.csv"
    path.write_text("\n".join([header, *lines]) + end)
    return path


BAD_ROWS = [
    # header, rows, line, field, part of the message
    (HEADER, [GOOD, "nan,alpha,1,1,1"], 3, "submit_s", "finite"),
    (HEADER, [GOOD, "-1,alpha,1,1,1"], 3, "submit_s", "negative"),
    (HEADER, ["10,alpha,1,1,1", "9.5,alpha,1,1,1"], 3, "submit_s", "sort the file"),
    (HEADER, [GOOD, "1,alpha,inf,1,1"], 3, "iterations", "finite"),
    (HEADER, [GOOD, "1,alpha,0,1,1"], 3, "iterations", "above 0"),
    (HEADER, [GOOD, "1,alpha,many,1,1"], 3, "iterations", "'many' is not a number"),
    (HEADER, [GOOD, "1,alpha,,1,1"], 3, "iterations", "missing"),
    (HEADER, [GOOD, "1,alpha,1e-10,1,1"], 3, "iterations", "must be 1e-09 to 1e+15, not 1e-10"),
    (HEADER, [GOOD, "1,alpha,2e15,1,1"], 3, "iterations", "must be 1e-09 to 1e+15, not 2e15;"),
    (HEADER, [GOOD, "2e10,alpha,1,1,1"], 3, "submit_s", "must be 0 to 1e+10, not 2e10;"),
    (HEADER, [GOOD, "1,alpha,1,1.5,2"], 3, "requested_gpus", "whole number"),
    (HEADER, [GOOD, "1,alpha,1,0,2"], 3, "requested_gpus", "at least 1"),
    (HEADER, [GOOD, "1,alpha,1,1,99999999999"], 3, "max_gpus", "check the number"),
    (HEADER, [GOOD, "1,alpha,1,4,2"], 3, "requested_gpus", "above the job's max_gpus 2"),
    (
        HEADER + ",step_gpus",
        [GOOD + ",1", "1,alpha,1,2,5,2"],
        3,
        "max_gpus",
        "no multiple of the job's step_gpus 2",
    ),
    (HEADER, [GOOD, "1,alpha,1,9,9"], 3, "requested_gpus", "the largest that works is 8"),
    (HEADER, [GOOD, "1,beta,1,13,16"], 3, "requested_gpus", "the largest that works is 12"),
    (HEADER, [GOOD, "1,beta,1,1,16"], 3, "requested_gpus", "the smallest that works is 2"),
    (HEADER, [GOOD, "1,alhpa,1,1,1"], 3, "model", "did you mean 'alpha'?"),
    (HEADER, [GOOD, "1,,1,1,1"], 3, "model", "missing"),
    (HEADER, [GOOD, "1,gamma,1,1,1"], 3, "model", "v100"),
    (HEADER, [GOOD, "1,alpha,1,1,1,7", GOOD], 3, None, "6 fields, the header has 5"),
    (HEADER, [GOOD, "1,alpha,1", "2,alpha,1,1,1"], 3, None, "3 fields, the header has 5"),
    (HEADER, [GOOD, "", "", "1,alpha,x,1,1"], 5, "iterations", "'x'"),
    (HEADER, [GOOD, "1,alpha,x,1,1", "2,alpha,1", "-3,beta,1,1,1"], 3, "iterations", "'x'"),
    (HEADER + ",min_gpus", [GOOD + ",1", "1,alpha,1,2,2,3"], 3, "min_gpus", "min 3 is above max 2"),
    (
        HEADER + ",min_gpus",
        [GOOD + ",", "1,alpha,1,1,4,2"],
        3,
        "requested_gpus",
        "below the job's min_gpus 2",
    ),
    (HEADER + ",job", [GOOD + ",a", "1,alpha,1,1,1,b", "2,alpha,1,1,1,a"], 4, "job", "already on line 2"),
    (HEADER + ",weight", [GOOD + ",1", "1,alpha,1,1,1,-2"], 3, "weight", "above 0"),
    (
        HEADER + ",kind",
        [GOOD + ",all-reduce", "1,alpha,1,1,1,allreduce"],
        3,
        "kind",
        "did you mean 'all-reduce'",
    ),
    (HEADER + ",gpu_types", [GOOD + ",gpu", "1,alpha,1,1,1,gpu|tpu"], 3, "gpu_types", "'tpu'"),
    ("submit_s,model,iterations,requested_gpus", ["0,alpha,1,1"], 1, "max_gpus", "missing"),
    (HEADER.replace("iterations", "iteration"), [GOOD], 1, "iteration", "did you mean 'iterations'?"),
    (HEADER + ",model", [GOOD + ",alpha"], 1, "model", "twice"),
    (HEADER.replace(",", ";"), [GOOD.replace(",", ";")], 1, None, "not a header"),
    (HEADER, [], 2, None, "empty"),
]


@pytest.mark.parametrize(("header", "rows", "line", "field", "part"), BAD_ROWS)
def test_a_bad_row_is_named_by_line_and_field(tmp_path, header, rows, line, field, part):
    error = fails(trace(tmp_path, *rows, header=header))
    assert (error.line, error.field) == (line, field)
    assert part in str(error)


def test_a_request_beyond_the_profile_names_the_gpu_type_where_profiles_tell_them(tmp_path):
    error = fails(trace(tmp_path, "0,gamma,1,9,9"), Cluster.pool(12, "v100"))
    assert str(error).endswith(
        "9 GPUs are beyond the profile of 'gamma' on v100; the largest that works is 8"
    )
    error = fails(trace(tmp_path, "0,alpha,1,9,9"), Cluster.pool(12, "v100"))
    assert "of 'alpha'; the largest" in str(error)


def test_windows_line_ends_and_a_byte_order_mark_change_nothing(tmp_path):
    path = tmp_path / "jobs.csv"
    rows = [HEADER, GOOD, "", "1, alpha ,7,2,4"]
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(rows).encode() + b"\r\n\r\n")
    jobs = read_jobs(path, PROFILES, POOL)
    assert [(j.submit_s, j.model, j.iterations, j.requested_gpus, str(j.gpus)) for j in jobs] == [
        (0, "alpha", 100, 1, "1..8"),
        (1, "alpha", 7, 2, "1..4"),
    ]
    path.write_bytes(path.read_bytes() + b"2,alpha,bad,1,1\r\n")
    assert fails(path).line == 6


def test_quoted_fields_that_span_lines_do_not_shift_the_line_numbers(tmp_path):
    header = "job," + HEADER
    path = trace(tmp_path, '"a\nb",' + GOOD, "c,1,alpha,x,1,1", header=header)
    assert fails(path).line == 4


def test_an_unclosed_quotation_mark_is_an_error(tmp_path):
    path = trace(tmp_path, GOOD, '1,"alpha,1,1,1', "2,alpha,1,1,1")
    assert fails(path).line == 3
    path = trace(tmp_path, GOOD, '1,"alpha,1,1,1', *["2,alpha,1,1,1"] * 20_000)
    assert fails(path).line == 3


@pytest.mark.parametrize("cut", range(1, 15))
def test_a_file_cut_off_within_its_last_line_is_called_so(tmp_path, cut):
    last = "1000,alpha,100,1,8"
    path = trace(tmp_path, GOOD, last[:-cut], end="")
    if last[:-cut].count(",") == 4 and not last[:-cut].endswith(","):
        pytest.skip("a number that lost digits is still a number")
    error = fails(path)
    assert error.line == 3
    assert "cut off" in str(error) or "missing" in str(error)


def test_a_missing_file_a_directory_and_an_empty_file(tmp_path):
    assert "no such file" in str(fails(tmp_path / "nowhere.csv"))
    assert "directory" in str(fails(tmp_path))
    (tmp_path / "empty.csv").touch()
    assert "is empty" in str(fails(tmp_path / "empty.csv"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read(tmp_path):
    path = trace(tmp_path, GOOD)
    path.chmod(0)
    assert "cannot be read" in str(fails(path))


@pytest.mark.parametrize(
    ("content", "line"),
    [(b"\0" * 4096, 1), (bytes(range(256)) * 16, 1), (b"\x7fELF\n" * 10, 11), (b"a" * 100_000, 1)],
)
def test_a_huge_file_that_is_not_a_trace_is_refused_by_its_head(tmp_path, content, line, monkeypatch):
    path = tmp_path / "jobs.csv"
    with path.open("wb") as file:
        file.write(content)
        file.truncate(1 << 30)  # sparse: a gigabyte that takes no room
    monkeypatch.setattr(pl, "read_csv", lambda *a, **k: pytest.fail("the file was read"))
    assert fails(path).line == line


@pytest.mark.parametrize("rows", [3, 20_000])  # within the head of the file and beyond it
def test_a_name_that_is_not_utf8_is_found_by_its_line(tmp_path, rows):
    path = tmp_path / "jobs.csv"
    good = GOOD.encode()
    path.write_bytes(
        HEADER.encode() + b"\n" + (good + b"\n") * rows + good.replace(b"alpha", b"Ren\xe9") + b"\n"
    )
    error = fails(path)
    assert error.line == rows + 2
    assert "UTF-8" in str(error)


@pytest.mark.parametrize("rows", [0, 3, 200_000])  # near the start, and some megabytes after it
def test_an_endless_line_is_refused_before_it_is_read(tmp_path, rows, monkeypatch):
    path = trace(tmp_path, *[GOOD] * rows, "1" * (70 << 10), end="")
    with path.open("ab") as file:
        file.truncate(1 << 30)  # sparse: a gigabyte that takes no room
    monkeypatch.setattr(pl, "read_csv", lambda *a, **k: pytest.fail("the file was read"))
    error = fails(path)
    assert error.line == rows + 2
    assert "longer than 1,048,576 bytes" in str(error)


@pytest.mark.parametrize("over", [0, 1])
def test_a_line_may_be_a_megabyte_long_and_no_longer(tmp_path, over):
    rest = ",alpha,100,1,8"
    long = "0" * ((1 << 20) + over - len(rest)) + rest
    path = trace(tmp_path, GOOD, long, GOOD)
    if over:
        assert fails(path).line == 3
    else:
        assert len(read_jobs(path, PROFILES, POOL)) == 3


def test_a_large_file_whose_first_rows_are_wrong_is_not_read_to_its_end(tmp_path, monkeypatch):
    from shoal.sim.inputs import jobs_file

    monkeypatch.setattr(jobs_file, "_LARGE_BYTES", 100)
    monkeypatch.setattr(jobs_file, "_FIRST_ROWS", 3)
    path = trace(tmp_path, GOOD, "1,alpha,x,1,1", *["2,alpha,1,1,1"] * 50)
    whole, seen = pl.read_csv, []
    monkeypatch.setattr(pl, "read_csv", lambda *a, **k: seen.append(k["n_rows"]) or whole(*a, **k))
    assert fails(path).line == 3
    assert seen == [4]


def test_users_must_be_the_clusters_where_it_names_any(tmp_path):
    named = POOL.with_users([User("ada"), User("bob")])
    path = trace(tmp_path, GOOD + ",ada", "1,alpha,1,1,1,boob", header=HEADER + ",user")
    error = fails(path, named)
    assert (error.line, error.field) == (3, "user")
    assert "did you mean 'bob'?" in str(error)
    assert [job.user for job in read_jobs(path, PROFILES, POOL)] == ["ada", "boob"]
    error = fails(trace(tmp_path, GOOD), named)
    assert (error.line, error.field) == (1, "user")


def test_parquet_says_the_row(tmp_path):
    path = tmp_path / "jobs.parquet"
    columns = {"submit_s": [0.0, 1.0], "model": ["alpha"] * 2, "iterations": [1.0, -1.0]}
    frame = pl.DataFrame({**columns, "requested_gpus": [1, 1], "max_gpus": [2, 2]})
    frame.write_parquet(path)
    error = fails(path)
    assert error.field == "iterations"
    assert "row 2" in str(error)
    path.write_bytes(path.read_bytes()[:-20])
    assert "cut off" in str(fails(path))
    frame.rename({"model": "modle"}).write_parquet(path)
    error = fails(path)
    assert "did you mean 'model'?" in str(error)
    assert error.line is None


FRAME = pl.DataFrame([[0.0], ["alpha"], [100.0], [1], [8]], schema=HEADER.split(","))


@pytest.mark.parametrize("name", ["jobs.csv", "jobs.parquet", "jobs"])
def test_csv_and_parquet_are_told_apart_by_what_is_in_the_file(tmp_path, name):
    path = tmp_path / name
    for write in (FRAME.write_csv, FRAME.write_parquet):
        write(path)
        (job,) = read_jobs(path, PROFILES, POOL)
        assert (job.model, job.iterations, str(job.gpus)) == ("alpha", 100, "1..8")


NEITHER = "is neither Parquet nor csv with the columns submit_s, model"


@pytest.mark.parametrize(
    ("name", "content", "line", "field", "part"),
    [
        ("jobs.parquet", b"hello", 1, None, NEITHER),
        ("jobs.parquet", b"hello\nworld\n", 1, None, NEITHER),
        ("jobs.csv", b"hello\nworld\n", 1, None, "the first line is not a header with columns submit_s"),
        ("jobs.parquet", b"PK\3\4\0\0", 1, None, "is not a trace in csv or Parquet: it holds binary data"),
        ("jobs.csv", b"PK\3\4\0\0", 1, None, "is not a trace in csv or Parquet: it holds binary data"),
        ("jobs.csv", b"PAR1\0\0", None, None, "cannot be read as a Parquet trace; it may be cut off"),
        ("jobs.parquet", b"", 1, None, "is empty"),
        (
            "jobs.parquet",
            f"{HEADER}\n{GOOD}\n1,alpha,x,1,1\n".encode(),
            3,
            "iterations",
            "'x' is not a number",
        ),
        ("jobs.parquet", HEADER.replace("model", "modle").encode(), 1, "modle", "did you mean 'model'?"),
    ],
    ids=[
        "a word named Parquet",
        "words named Parquet",
        "words named csv",
        "a zip named Parquet",
        "a zip named csv",
        "a bit of Parquet named csv",
        "nothing named Parquet",
        "a bad row of a csv named Parquet",
        "a bad header of a csv named Parquet",
    ],
)
def test_what_is_neither_csv_nor_parquet_is_refused_in_one_line(tmp_path, name, content, line, field, part):
    path = tmp_path / name
    path.write_bytes(content)
    error = fails(path)
    assert (error.line, error.field) == (line, field)
    assert part in str(error)


@pytest.mark.parametrize(
    ("columns", "field", "part"),
    [
        ({"submit_s": [date(2020, 1, 1)] * 2}, "submit_s", "contains Date, not numbers"),
        ({"submit_s": [datetime(2020, 1, 1)] * 2}, "submit_s", "contains Datetime, not numbers"),
        ({"requested_gpus": [True, True]}, "requested_gpus", "contains Boolean, not numbers"),
        ({"model": [date(2020, 1, 1)] * 2}, "model", "contains Date, not names"),
        ({"gpu_types": [b"\xff", b"x"]}, "gpu_types", "contains Binary"),
        ({"gpu_types": [["gpu"], ["gpu"]]}, "gpu_types", "contains List, not one number or text per row"),
        ({"job": ["a", ""]}, "job", "row 2: the text is empty"),
        ({"job": ["a", "a"]}, "job", "row 2: the name 'a' is already on row 1"),
        ({"user": ["a", " "]}, "user", "row 2: the text is empty"),
        ({"model": ["alpha", ""]}, "model", "row 2: a value is missing here"),
    ],
)
def test_parquet_of_other_types_is_refused_by_column_and_row(tmp_path, columns, field, part):
    path = tmp_path / "jobs.parquet"
    good = {"submit_s": [0.0, 1.0], "model": ["alpha"] * 2, "iterations": [1.0, 1.0]}
    pl.DataFrame({**good, "requested_gpus": [1, 1], "max_gpus": [2, 2], **columns}).write_parquet(path)
    error = fails(path)
    assert (error.line, error.field) == (None, field)
    assert part in str(error)


def test_an_empty_parquet_trace_has_no_line_2(tmp_path):
    path = tmp_path / "jobs.parquet"
    columns = dict.fromkeys(HEADER.split(","), pl.Float64)
    pl.DataFrame(schema=columns | {"model": pl.String}).write_parquet(path)
    error = fails(path)
    assert "the trace is empty" in str(error)
    assert error.line is None


def test_a_trace_of_an_unknown_kind_has_the_right_article(tmp_path):
    path = tmp_path / "trace"
    path.write_bytes(b"\0\1")
    with pytest.raises(InputError, match="is not an ElasticFlow trace"):
        format_named("elasticflow").read(path)


BAD_PROFILES = [
    ("model,gpus,seconds_per_iteration\na,1,1\na,1,2\n", 3, "gpus", "already on line 2"),
    ("model,gpus,seconds_per_iteration\na,0,1\n", 2, "gpus", "at least 1"),
    ("model,gpus,seconds_per_iteration\na,1,0\n", 2, "seconds_per_iteration", "above 0"),
    ("model,gpus,seconds_per_iteration\na,1,nan\n", 2, "seconds_per_iteration", "finite"),
    ("model,gpus,seconds_per_iteration\na,1,1e-308\n", 2, "seconds_per_iteration", "not 1e-308; check its"),
    ("model,gpus,seconds_per_iteration\na,1,1\na,2,1e-301\n", 3, "seconds_per_iteration", "must be 1e-09 to"),
    ("model,gpus,seconds_per_iteration\na,1,2e9\n", 2, "seconds_per_iteration", "to 1e+09, not 2e9;"),
    ("model,gpus,seconds_per_iteration\n,1,1\n", 2, "model", "missing"),
    ("model,gpus,seconds_per_iteration\na,1000000000000,1\n", 2, "gpus", "check the number"),
    ("model,gpus,seconds_per_iteration\n", 2, None, "no profiles"),
    ("model,gpus,seconds_per_iter\na,1,1\n", 1, "seconds_per_iter", "did you mean 'seconds_per_iteration'"),
    ("model,gpus,seconds_per_iteration,nodes\na,2,1,3\n", 2, "nodes", "2 GPUs cannot be on 3 nodes"),
    ("model,gpus,seconds_per_iteration,nodes\na,2,1\n", 2, None, "3 fields, the header has 4"),
]


@pytest.mark.parametrize(("text", "line", "field", "part"), BAD_PROFILES)
def test_bad_profiles(tmp_path, text, line, field, part):
    path = tmp_path / "profiles.csv"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        read_profiles(path)
    assert (caught.value.line, caught.value.field) == (line, field)
    assert part in str(caught.value)


BAD_CLUSTERS = [
    ("nodes:\n  - {count: 1, gpu: 4}\n", 2, "gpu", "did you mean 'gpus'?"),
    ("nodes:\n  - {count: 1}\n", 2, "gpus", "missing"),
    ("nodes:\n  - {gpus: 4}\n  - count: 0\n    gpus: 4\n", 3, "count", "at least 1"),
    ("nodes:\n  - {gpus: four}\n", 2, "gpus", "whole number"),
    ("nodes:\n  - {gpus: 4, name: a}\n  - {gpus: 4, name: a}\n", 3, "name", "names must differ"),
    ("nodes:\n  - {gpus: 4, gpus: 8}\n", 2, "gpus", "twice"),
    ("nodes: 4\n", 1, "nodes", "list"),
    ("nodes: []\n", 1, "nodes", "empty"),
    ("users:\n  a: 1\n", 1, "nodes", "missing"),
    ("nodes:\n  - {gpus: 4}\nusers:\n  - {name: a, tickets: 0}\n", 4, "tickets", "positive"),
    ("nodes:\n  - {gpus: 4}\nusers:\n  a: 1\n  b: -3\n", 5, "tickets", "positive"),
    ("nodes:\n  - {gpus: 4}\nusers:\n  a: .inf\n", 4, "tickets", "positive"),
    ("nodes:\n  - {gpus: 4}\nusers:\n  - a\n  - a\n", 5, "users", "names must differ"),
    ("nodes:\n  - {gpus: 4}\nusers:\n  - {tickets: 3}\n", 4, "name", "missing"),
    ("nodes:\n  - {gpus: 4}\nuser: {}\n", 3, "user", "did you mean 'users'?"),
    ("nodes:\n  - {gpus: 4\nusers: []\n", 3, None, "not valid YAML"),
    ("nodes:\n  - {count: 1000000, gpus: 1000000}\n", 2, "count", "check the numbers"),
    ("just words\n", 1, None, "mapping"),
    ("# nothing\n", 1, None, "empty"),
    ("", 1, None, "is empty; a cluster description needs `nodes:`"),
    ("\0\1\2", 1, None, "binary"),
]


@pytest.mark.parametrize(("text", "line", "field", "part"), BAD_CLUSTERS)
def test_bad_clusters(tmp_path, text, line, field, part):
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        read_cluster(path)
    assert "\n" not in str(caught.value)
    assert (caught.value.line, caught.value.field) == (line, field)
    assert part in str(caught.value)


def test_nothing_partial_is_left_when_writing_fails(tmp_path):
    path = tmp_path / "out.csv"
    path.write_text("before")

    def interrupted() -> None:
        with write_aside(path) as aside:
            aside.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(ShoalError, match="cannot write"), write_aside(tmp_path / "no" / "where.csv"):
        pass
    with write_aside(path) as aside:
        aside.write_text("after")
    assert path.read_text() == "after"
    assert list(tmp_path.iterdir()) == [path]


def test_a_jobs_range_is_cut_to_the_profile_the_cluster_and_the_types_it_accepts(tmp_path):
    mixed = Cluster((Node("a", 4, "v100"), Node("b", 4, "v100"), Node("c", 16, "k80")))
    header = HEADER + ",gpu_types"
    rows = [
        "0,alpha,1,1,64,",
        "0,beta,1,2,64,",
        "0,beta,1,2,64,v100",
        "0,gamma,1,1,64,v100",
        "0,alpha,1,1,2,k80|v100",
    ]
    jobs = read_jobs(trace(tmp_path, *rows, header=header), PROFILES, mixed)
    assert [str(job.gpus) for job in jobs] == ["1..8", "2..16", "2..8", "1..8", "1..2"]
    assert jobs[4].gpu_types == ("k80", "v100")


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), pl.exceptions.ComputeError("full")]
)
@pytest.mark.parametrize("name", ["out.csv", "/proc/out.csv"])
def test_what_keeps_a_table_from_being_written_is_told_in_a_line(error, name, tmp_path):
    path = tmp_path / name
    with (
        pytest.raises(ShoalError, match=rf"^cannot write {path}: (No space left on device|full)$"),
        write_aside(path),
    ):
        raise error
    assert not list(tmp_path.iterdir())
