"""What commands print: tables that fit, lengths of time, reasons, plans."""

from datetime import UTC, datetime, timedelta

import pytest

from shoal.cli import array_lines, jobs_table, out
from shoal.cli.columns import lines
from shoal.cli.down import _fate
from shoal.cli.events import story_line
from shoal.cli.fair_tables import ledger_rows
from shoal.cli.follow import exit_code, once
from shoal.cli.out import duration
from shoal.cli.profile import describe
from shoal.cli.times import ago, seconds, since
from shoal.cli.why import explain, when
from shoal.core.errors import ShoalError
from shoal.server.api.models import (
    Array,
    CouldDo,
    Estimate,
    Event,
    Job,
    JobRef,
    JobState,
    LogLine,
    Profile,
    Reason,
    SpeedPoint,
    Status,
    Why,
)

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)


def job(**changes):
    given = {
        "id": 7, "name": "resnet-a", "user": "ada", "state": "running", "gpus": 4, "target_gpus": 4,
        "gpu_type": "V100", "min_gpus": 2, "max_gpus": 8, "requested_gpus": 8, "resize": "live",
        "command": ["x"], "workdir": "/", "submitted_at": NOW - timedelta(hours=2), "speedup": 3.42,
        "speedup_measured": True,
        "progress": 0.41,
    }  # fmt: skip
    return Job.model_validate(given | changes)


def test_a_job_is_one_line_with_the_reason_last():
    reason = Reason(code="NotWorthIt", sentence="at 4: next GPU adds 0.31 < price 0.52")
    assert jobs_table.row(job(reason=reason), NOW) == [
        "resnet-a", "ada", "running", "4xV100", "2..8", "3.4x", "41%", "2h",
        "NotWorthIt: at 4: next GPU adds 0.31 < price 0.52",
    ]  # fmt: skip


def test_what_another_column_says_is_left_out_of_the_reason():
    reason = Reason(code="NotWorthIt", sentence="it has 4 GPUs; one more would not make it faster")
    assert jobs_table.row(job(reason=reason), NOW)[-1] == "NotWorthIt: one more would not make it faster"


def test_a_job_that_is_being_resized_shows_both_sizes_and_one_without_gpus_a_dash():
    assert jobs_table.gpus(job(gpus=4, target_gpus=2)) == "4→2"
    assert jobs_table.gpus(job(state="pending", gpus=0, target_gpus=0)) == "-"


@pytest.mark.parametrize(
    ("remaining", "text"),
    [
        ({"low_s": 60.0, "high_s": 60.0, "basis": "the job's own count of steps"}, "1m 0s"),
        ({"low_s": 30.0, "high_s": 120.0, "basis": "its loss curve"}, "~2m 0s"),
        ({"low_s": 60.0, "high_s": None, "basis": "its loss curve"}, "~1m 0s"),
        ({"unknown": "nothing is known of its length"}, "-"),
    ],
)
def test_the_time_left_is_marked_where_it_is_an_estimate(remaining, text):
    shown = job(remaining=Estimate(**remaining))
    assert jobs_table.wide_row(shown, NOW)[jobs_table.WIDE_HEAD.index("LEFT")] == text


def test_a_speed_up_is_marked_where_it_is_an_estimate():
    at = jobs_table.WIDE_HEAD.index("SPEEDUP")
    assert jobs_table.wide_row(job(), NOW)[at] == "3.4x"
    assert jobs_table.wide_row(job(speedup_measured=False), NOW)[at] == "~3.4x"


def test_the_line_of_an_array_names_its_idle_tasks():
    tasks = [
        job(id=i, name=f"folds-{i}", array={"id": 9, "name": "folds", "index": i}, idle_s=idle_s)
        for i, idle_s in enumerate([700.0, None, 900.0, 800.0, 600.0])
    ]
    array = Array(
        id=9, name="folds", user="ada", tasks=5, created_at=NOW, jobs={"running": 5}, gpus=5, first=0, last=4
    )  # fmt: skip
    (row,) = array_lines.rows(tasks, lambda _: array)
    assert row[-1] == "folds-2, folds-3, folds-0 and 1 more use no GPU (idle for up to 15m 0s); 5 running"
    (row,) = array_lines.rows(tasks[:2], lambda _: array)
    assert row[-1] == "folds-0 uses no GPU (idle for up to 11m 40s); 5 running"
    (row,) = array_lines.rows(tasks[1:2], lambda _: array)
    assert row[-1] == "5 running"


def test_profile_marks_what_follows_from_an_estimated_speed():
    speeds = {1: (10.0, False), 2: (19.0, True), 3: (27.0, True)}
    points = [SpeedPoint(gpus=n, speed=speed, measured=measured) for n, (speed, measured) in speeds.items()]
    ref = JobRef(
        id=7, user="ada", state="running", gpus=2, target_gpus=2, min_gpus=1, max_gpus=3, resize="live"
    )
    found = Profile(
        job=ref,
        basis="measured",
        points=points,
        remaining=Estimate(unknown="?"),
        next_measurement="next at 1 GPU",
    )
    table = describe(found, plot=False)
    assert "~1.90x" in table[2], "the speed of one GPU is an estimate"
    assert "~+90%" in table[2]
    assert "~2.70x" in table[3]
    assert " +42%" in table[3], "both speeds were measured"
    assert "to measure: next at 1 GPU" in table
    over = found.model_copy(update={"job": ref.model_copy(update={"state": JobState.SUCCEEDED, "gpus": 0})})
    assert describe(over, plot=False)[4:] == ["speeds: measured", "left: nothing, the job is over"]


def test_the_wide_row_has_a_cell_for_every_column():
    assert len(jobs_table.wide_row(job(), NOW)) == len(jobs_table.WIDE_HEAD)


def test_the_table_fits_its_width_and_only_the_last_column_is_cut():
    rows = [jobs_table.row(job(reason=Reason(code="Fragmented", sentence="x" * 300)), NOW)]
    made = lines(jobs_table.HEAD, rows, width=100)
    assert max(map(len, made)) == 100
    assert made[1].endswith("…")
    assert max(map(len, lines(jobs_table.HEAD, rows, width=None))) > 300


def test_a_narrow_table_does_without_other_columns_before_the_reason():
    rows = [jobs_table.row(job(reason=Reason(code="Fragmented", sentence="x" * 300)), NOW)]
    narrow = lines(jobs_table.HEAD, rows, width=80, spare=jobs_table.SPARE)
    assert narrow[0].split() == ["NAME", "STATE", "GPUS", "WANT", "AGE", "REASON"]
    assert "Fragmented: xxx" in narrow[1]
    least = lines(jobs_table.HEAD, rows, width=20, spare=jobs_table.SPARE)
    assert max(map(len, least)) <= 20
    short = [jobs_table.row(job(), NOW)]
    assert "SPEEDUP" in lines(jobs_table.HEAD, short, width=72, spare=jobs_table.SPARE)[0]


def test_what_a_user_is_off_its_due_is_in_its_first_row_and_nothing_has_no_sign():
    account = {"entitled": 7200.0, "traded": 0.0, "received": 7199.0, "borrowed": 0.0, "lent": -1.0}
    rows = ledger_rows({"ada": {"K80": account, "V100": account, "deviation": -0.0001}})
    assert [row[0] for row in rows] == ["ada", ""]
    assert [row[-1] for row in rows] == ["0.0 %", ""]
    assert rows[0][2:7] == ["2.0", "0.0", "2.0", "0.0", "0.0"]


def test_what_becomes_of_the_jobs_is_told_when_the_server_ends():
    status = Status.model_construct(jobs={"running": 2, "pending": 1, "failed": 7})
    assert _fate(status, keep_jobs=False).startswith("3 unfinished jobs (2 running): running jobs stop")
    assert "running jobs continue" in _fate(status, keep_jobs=True)


def test_control_characters_never_reach_the_terminal():
    made = lines(["A", "B"], [["x\x1b[31m\n", "y\x07"]], width=80)
    assert all(text.isprintable() for text in made)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("90", 90), ("90s", 90), ("2h", 7200), ("1h30m", 5400), ("250ms", 0.25), ("1.5d", 129600)],
)
def test_lengths_of_time_as_people_write_them(text, expected):
    assert seconds(text) == pytest.approx(expected)


@pytest.mark.parametrize("text", ["", "h", "2x", "1h x", "-3s", "99999999999w", "1h30"])
def test_what_is_no_length_of_time_is_refused(text):
    with pytest.raises(ShoalError):
        seconds(text)


def test_a_point_in_time_is_given_by_its_distance_or_by_itself():
    assert since("2026-01-31T12:00:00Z") == datetime(2026, 1, 31, 12, tzinfo=UTC)
    assert abs((datetime.now(UTC) - since("2h")).total_seconds() - 7200) < 60
    assert since(None) is None
    with pytest.raises(ShoalError, match="is not a time"):
        since("2026-99-99")


@pytest.mark.parametrize(
    ("length_s", "text"),
    [
        (None, "-"),
        (0, "0.0s"),
        (9.96, "10s"),
        (59.7, "1m 0s"),
        (3599.6, "1h 0m"),
        (12_179, "3h 23m"),
        (86_399, "1d 0h"),
    ],
)
def test_lengths_of_time_are_rounded_to_two_units(length_s, text):
    assert duration(length_s) == text


def test_ages_have_one_unit():
    for passed, text in ((5, "5s"), (90, "1m"), (7300, "2h"), (3 * 86400, "3d")):
        assert ago(NOW - timedelta(seconds=passed), NOW) == text


def test_the_result_of_a_job_is_the_exit_code():
    codes = {state: exit_code(job(state=state)) for state in ("succeeded", "failed", "cancelled", "running")}
    assert codes == {"succeeded": 0, "failed": 100, "cancelled": 103, "running": 101}


def ref(**changes):
    given = {"id": 1, "name": "a", "user": "ada", "state": "pending", "gpus": 0, "target_gpus": 0}
    return JobRef.model_validate(given | {"min_gpus": 2, "max_gpus": 4} | changes)


def test_why_tells_reason_evidence_who_is_ahead_when_and_what_would_help():
    answer = Why(
        job=ref(),
        reason=Reason(code="WaitingForCapacity", sentence="all are in use", evidence={"free_gpus": 1}),
        sentence="2 GPUs are needed and 1 is free",
        policy="fifo",
        ahead=[ref(id=2, name=None, user="ben", state="running", gpus=3)],
        ahead_total=3,
        starts_in=Estimate(low_s=30, high_s=90, basis="measured speed"),
        could=[CouldDo(change="min_gpus", value=1, sentence="it would start now with --min 1")],
    )
    text = "\n".join(explain(answer))
    for part in (
        "a is pending, has 0 of 2..4 GPUs (policy fifo)",
        "WaitingForCapacity: all are in use",
        "free gpus                1",
        "Ahead of you (3)",
        "a job of ben",
        "and 2 more",
        "in 30s to 1m 30s (measured speed)",
        "it would start now with --min 1",
    ):
        assert part in text


def test_an_estimate_that_is_not_known_says_why():
    assert when(Estimate(unknown="no job tells its length")) == "unknown: no job tells its length"
    assert when(Estimate(low_s=60)) == "in 1m 0s or more"


@pytest.mark.parametrize(
    ("width", "left_out"), [(200, []), (40, []), (34, [3]), (26, [3]), (25, [3, 2]), (5, [3, 2])]
)
def test_numbers_that_do_not_fit_are_left_out_whole_the_last_ones_first(width, left_out):
    head = ["policy", "avg", "makespan", "took"]
    rows = [["afs-l", "1h 25m", "36d 2h", "123.4567s"], ["fifo", "3h 31m", "65d 9h", "1.0s"]]
    assert out._left_out(head, rows, [1, 2, 3], width) == left_out


def test_an_event_has_its_id_and_the_ids_of_its_causes():
    event = Event(
        id=42, at=datetime.now(UTC), type="job.target", actor="system", job=7, job_name="resnet-a",
        message="grow: 2 -> 4 GPUs",
    )  # fmt: skip
    assert " ".join(story_line(event).split()[1:]) == "#42 job.target system resnet-a grow: 2 -> 4 GPUs"
    caused = event.model_copy(update={"cause": 40, "plan": 7})
    assert story_line(caused).endswith("grow: 2 -> 4 GPUs  (by #40, decision 7)")
    assert story_line(event.model_copy(update={"plan": 7})).endswith("(decision 7)")


def test_what_new_workers_print_alike_is_printed_once():
    def line(worker, text, *, rank=None, after_s=0.0):
        return LogLine(at=NOW + timedelta(seconds=after_s), worker=worker, rank=rank, text=text)

    usage, error = "usage: train.py", "train.py: error: unrecognized arguments: --x"
    printed = [
        line("7.0", usage), line("7.1", usage), line("7.1", error), line("7.0", error), line("7.2", usage),
        line("7.2", "another error"), line("7.3", usage, after_s=60), line("7.0", "step 1", rank=0),
        line("7.1", "step 1", rank=1),
    ]  # fmt: skip
    assert [(x.worker, x.text) for x in once(printed)] == [
        ("7.0", usage), ("7.1", error), ("7.2", "another error"), ("7.3", usage),
        ("7.0", "step 1"), ("7.1", "step 1"),
    ]  # fmt: skip
