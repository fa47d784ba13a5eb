"""Alibaba's PAI trace: two tables, each with its own mistakes."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal.core.errors import InputError
from shoal.sim.importers import Wishes, convert, format_named

from .samples import ONE, SAMPLES, complaint, damage


def test_one_unreadable_task_makes_its_whole_job_bad(tmp_path):
    """Otherwise a job would silently come out smaller than it was."""
    path = tmp_path / "pai_task_table.csv"
    path.write_text(SAMPLES["alibaba-pai"] + "j2,worker2,1.0,Terminated,1120.0,never,600.0,29.3,100.0,T4\n")
    result = convert(format_named("alibaba-pai").read(path), ONE, Wishes(skip_bad=True))
    assert result.jobs["job"].to_list() == ["j1"]
    assert (len(result.bad), result.left_out["tasks of a job with a malformed task"]) == (1, 2)


#: The job table of PAI, and what is said of it: line, field, part of the message.
BAD_JOB_TABLES = [
    ("j1,i,ida,T,1000,1\nj2,i,eve,T,nan,1\n", 2, "start_time", "'nan' is not a number of seconds"),
    ("j1,i,ida,T,1000,1\nj2,i,eve,T,zzz,1\n", 2, "start_time", "'zzz' is not a number of seconds"),
    ("j2,i,eve,T,1050,1\nj1,i,ida,T,1000,1\nj2,i,ann,T,9,1\n", 3, "job_name", "'j2' is already on line 1"),
]


@pytest.mark.parametrize(("text", "line", "field", "part"), BAD_JOB_TABLES)
def test_a_bad_row_of_the_pai_job_table_is_told_at_its_own_place(tmp_path, text, line, field, part):
    (tmp_path / "pai_task_table.csv").write_text(SAMPLES["alibaba-pai"])
    table = tmp_path / "pai_job_table.csv"
    table.write_text(text)
    trace = format_named("alibaba-pai").read(tmp_path)
    with pytest.raises(InputError) as caught:
        convert(trace, ONE)
    error = caught.value
    assert (error.file, error.line, error.field) == (str(table), line, field)
    assert part in str(error)
    assert f"1 of {text.count(chr(10))} rows" in str(error)
    result = convert(trace, ONE, Wishes(skip_bad=True))
    assert len(result.bad) == 1
    if field == "job_name":  # the first row stands
        assert result.jobs["user"].to_list() == ["ida", "eve"]
    else:  # nothing is put in the place of what the table should say
        assert result.jobs["job"].to_list() == ["j1"]
        assert result.left_out["jobs with a malformed row in pai_job_table.csv"] == 1


def test_bad_rows_of_both_pai_tables_are_counted_each_for_itself(tmp_path):
    (tmp_path / "pai_task_table.csv").write_text(SAMPLES["alibaba-pai"].replace("1000.0,1020.0", "x,1020.0"))
    (tmp_path / "pai_job_table.csv").write_text("j1,i,ida,T,x,1\nj2,i,eve,T,x,1\n")
    with pytest.raises(
        InputError, match=r"task_table.csv:1: .*1 of 5 rows cannot be used; more in pai_job_table.csv"
    ):
        convert(format_named("alibaba-pai").read(tmp_path), ONE)


def test_pai_jobs_of_which_the_job_table_does_not_say_all_are_told(tmp_path):
    (tmp_path / "pai_task_table.csv").write_text(SAMPLES["alibaba-pai"])
    (tmp_path / "pai_job_table.csv").write_text("j2,i,eve,T,,1\n")
    result = convert(format_named("alibaba-pai").read(tmp_path), ONE)
    assert result.jobs["user"].to_list() == ["unknown", "eve"]
    assert result.jobs["submit_s"].to_list() == [0, 100]
    assert result.notes[1:] == (
        "1 jobs are not in pai_job_table.csv: submitted when they start",
        "1 jobs have no start_time in pai_job_table.csv: submitted when their first task starts",
        "1 jobs name no user: written as user 'unknown'",
    )


def test_a_pai_job_without_user_is_of_user_unknown_and_that_is_told(tmp_path):
    (tmp_path / "pai_task_table.csv").write_text(SAMPLES["alibaba-pai"])
    (tmp_path / "pai_job_table.csv").write_text("j1,i,ida,T,1000,1\nj2,i,,T,1050,1\n")
    result = convert(format_named("alibaba-pai").read(tmp_path), ONE)
    assert result.jobs["user"].to_list() == ["ida", "unknown"]
    assert result.jobs["submit_s"].to_list() == [0, 50]
    assert result.notes[1:] == ("1 jobs name no user: written as user 'unknown'",)


@pytest.mark.parametrize("start", ["0", "0.0", ""])
def test_a_pai_task_whose_start_is_0_or_missing_has_no_known_start(tmp_path, start):
    path = tmp_path / "pai_task_table.csv"
    path.write_text(SAMPLES["alibaba-pai"].replace("1000.0,1020.0", f"{start},1020.0"))
    result = convert(format_named("alibaba-pai").read(path), ONE)
    assert result.jobs["job"].to_list() == ["j2"]
    assert dict(result.left_out) == {"used no GPU": 1, "no known start": 1, "not finished": 1}


def test_a_time_of_0_in_the_pai_job_table_or_of_a_task_without_gpus_is_no_submission(tmp_path):
    (tmp_path / "pai_task_table.csv").write_text(SAMPLES["alibaba-pai"].replace("1100.0,1230.0", "0,1230.0"))
    (tmp_path / "pai_job_table.csv").write_text("j1,i,ida,T,1000,1\nj2,i,eve,T,0,1\n")
    result = convert(format_named("alibaba-pai").read(tmp_path), ONE)
    assert result.jobs["submit_s"].to_list() == [0, 120]
    assert "1 jobs have no start_time in pai_job_table.csv" in result.notes[1]


def test_pai_users_and_submissions_come_from_the_job_table(tmp_path):
    (tmp_path / "pai_task_table.csv").write_text(SAMPLES["alibaba-pai"])
    (tmp_path / "pai_job_table.csv").write_text(
        "job_name,inst_id,user,status,start_time,end_time\n"
        "j2,i2,eve,Terminated,1050.0,1230.0\nj1,i1,ida,Terminated,1000.0,1020.0\n"
    )
    result = convert(format_named("alibaba-pai").read(tmp_path), ONE)
    assert result.jobs["user"].to_list() == ["ida", "eve"]
    assert result.jobs["submit_s"].to_list() == [0, 50]
    assert result.notes == ("1 jobs requested fractions of GPUs: rounded up to whole GPUs",)


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_damage_to_the_pai_job_table_is_harmless_or_refused_in_one_line(tmp_path, data):
    (tmp_path / "pai_task_table.csv").write_text(SAMPLES["alibaba-pai"])
    content = bytearray(b"j1,i1,ida,Terminated,1000.0,1020.0\nj2,i2,eve,Terminated,1050.0,1230.0\n")
    damage(content, data)
    (tmp_path / "pai_job_table.csv").write_bytes(content)
    trace = lambda: format_named("alibaba-pai").read(tmp_path)  # noqa: E731
    for skip in (False, True):
        said = complaint(lambda: convert(trace(), ONE, Wishes(skip_bad=skip)))  # noqa: B023
        assert said is None or (said.startswith(str(tmp_path)) and len(said.splitlines()) == 1)
