"""Jobs from the command line: what goes where, and how each ends."""

import json
import os
import signal

import pytest
from live_cluster import eventually

pytestmark = pytest.mark.timeout(90)


def test_the_output_of_the_job_is_the_output_of_run(live):
    done = live.shoal("run", "--name", "echo-1", "--", "sh", "-c", "echo one; echo two", code=0)
    assert done.stdout == "one\ntwo\n"
    assert "echo-1: succeeded" in done.stderr


def test_run_ends_as_the_job_ends(live):
    failed = live.shoal("run", "--name", "f1", "--", "sh", "-c", "exit 3", code=100)
    assert "f1: failed" in failed.stderr
    assert live.json("show", "f1")["exit_code"] == 3
    live.shoal("wait", "f1", code=100)
    live.shoal("logs", "-f", "f1", code=100)
    live.shoal("logs", "f1", code=0)


def test_a_program_that_is_not_there_fails_and_says_which(live):
    failed = live.shoal("run", "--name", "f2", "--", "no-such-program-here", code=100)
    assert "no-such-program-here" in failed.stderr + failed.stdout


def test_a_cancelled_job_is_exit_code_103_for_whoever_waits(live):
    live.shoal("run", "-d", "--name", "c2", "--", "sleep", "600", code=0)
    waiting = live.start("wait", "c2")
    live.shoal("wait", "c2", "--for", "running", "--timeout", "30s", code=0)
    live.shoal("cancel", "c2", "-y", "--grace", "0s", code=0)
    assert waiting.wait(30) == 103
    waiting.communicate()
    live.shoal("cancel", "c2", "-y", code=5)


def test_wait_gives_up_with_exit_code_124(live):
    live.shoal("run", "-d", "--name", "w1", "--", "sleep", "600", code=0)
    late = live.shoal("wait", "w1", "--timeout", "300ms", code=124)
    assert "w1 is still" in late.stderr
    live.shoal("cancel", "w1", "-y", "--grace", "0s", code=0)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_detaches_says_how_to_come_back_and_cancels_nothing(live, number, code):
    run = live.start("run", "--name", "d1", "--", "sh", "-c", "echo begun; sleep 600")
    assert run.stdout.readline() == "begun\n"
    os.killpg(run.pid, number)
    _, said = run.communicate(timeout=30)
    assert run.returncode == code, said
    assert "shoal logs -f d1" in said
    assert "shoal cancel d1" in said
    assert "Traceback" not in said
    assert live.json("show", "d1")["state"] == "running"
    live.shoal("cancel", "d1", "-y", "--grace", "0s", code=0)


def test_a_job_that_is_paused_holds_no_gpu_and_goes_on_when_resumed(live):
    live.shoal("run", "-d", "--name", "p1", "--", "sh", "-c", "echo begun; sleep 600", code=0)
    live.shoal("wait", "p1", "--for", "running", "--timeout", "30s", code=0)
    live.shoal("pause", "p1", code=0)
    live.shoal("wait", "p1", "--for", "paused", "--timeout", "30s", code=0)
    held = live.json("why", "p1")
    assert held["reason"]["code"] == "Held"
    assert eventually(lambda: live.json("show", "p1")["gpus"] == 0)
    live.shoal("resume", "p1", code=0)
    live.shoal("wait", "p1", "--for", "running", "--timeout", "30s", code=0)
    live.shoal("cancel", "p1", "-y", "--grace", "0s", code=0)


def test_each_rank_of_a_gang_has_its_environment_and_its_prefix(live):
    script = "echo rank $RANK of $WORLD_SIZE at $MASTER_ADDR"
    done = live.shoal("run", "--name", "g1", "--gpus", "2", "--per-gpu", "--", "sh", "-c", script, code=0)
    assert sorted(done.stdout.splitlines()) == [
        "[0] rank 0 of 2 at 127.0.0.1",
        "[1] rank 1 of 2 at 127.0.0.1",
    ]
    only = live.shoal("logs", "g1", "--rank", "1", code=0)
    assert only.stdout == "[1] rank 1 of 2 at 127.0.0.1\n"
    assert live.shoal("logs", "g1", "--tail", "1", code=0).stdout.count("\n") == 1
    assert live.shoal("logs", "-f", "g1", "--tail", "1", code=0).stdout.count("\n") == 1


def test_secrets_reach_the_job_and_nobody_else(live):
    args = [
        "run",
        "--name",
        "s1",
        "--secret",
        "KEY",
        "-e",
        "OPEN=yes",
        "--",
        "sh",
        "-c",
        "echo ${#KEY} $OPEN",
    ]
    done = live.shoal(*args, code=0, env={"KEY": "hush-hush-9"})
    assert done.stdout == "11 yes\n"
    for command in (
        ["show", "s1", "-v"],
        ["show", "s1", "-o", "json"],
        ["events", "-o", "json", "--since", "1h"],
    ):
        assert "hush-hush-9" not in live.shoal(*command, code=0).stdout


def test_a_job_file_is_submitted_and_an_idempotency_key_makes_no_second_job(live, tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text("name: y1\ncommand: sh -c 'pwd; echo $A'\nenv: {A: 1e3}\n")
    done = live.shoal("submit", "-f", path, "--set", "env.A=0.5", code=0)
    assert done.stdout == f"{tmp_path}\n0.5\n"
    first = live.shoal(
        "submit", "-d", "-f", path, "--name", "y2", "--idempotency-key", "k", "-o", "json", code=0
    )
    second = live.shoal(
        "submit", "-d", "-f", path, "--name", "y2", "--idempotency-key", "k", "-o", "json", code=0
    )
    assert json.loads(first.stdout)["id"] == json.loads(second.stdout)["id"]
    piped = live.shoal("submit", "-y", "-f", "-", stdin="command: echo piped\n", code=0)
    assert piped.stdout == "piped\n"
    live.shoal("submit", "-f", "-", stdin="command: echo piped\n", code=2)


def test_an_array_is_one_line_and_runs_so_many_at_once(live, tmp_path):
    """A sweep waits for an array, each task knows itself, and `ps` stays readable."""
    holds = "sleep 600"
    array = json.loads(
        live.shoal(
            "run", "-d", "--array", "1-40%2", "--name", "folds", "-o", "json", "--", "sh", "-c", holds
        ).stdout
    )
    assert (array["tasks"], array["max_running"]) == (40, 2)
    eventually(lambda: live.json("ps", "--array", "folds", "-s", "running")["items"])
    path = tmp_path / "sweep.yaml"
    path.write_text(
        "name: tune\ncommand: sh -c 'echo {lr} $SHOAL_SWEEP_LR $SHOAL_ARRAY_INDEX'\n"
        "sweep: {lr: [0.1, 1e-3]}\nafter: {job: folds, on: any}\nlabels: {team: blue}\n"
    )
    live.shoal("submit", "-f", path, code=0)
    table = live.shoal("ps", "-u", "admin", code=0).stdout
    assert len([line for line in table.splitlines() if "folds" in line.split()[0]]) == 1
    assert "folds[40]" in table
    assert "38 pending" in table or "39 pending" in table
    assert "Dependency" in live.shoal("why", "tune-0", code=0).stdout
    assert len(live.json("ps", "-l", "team=blue")["items"]) == 2
    assert live.shoal("ps", "--expand", code=0).stdout.count("folds-") == 40
    cancelled = live.shoal("cancel", "folds", "-y", "--grace", "0s", code=0)
    assert "folds: cancelled" in cancelled.stderr
    for name, text in (("tune-0", "0.1 0.1 0\n"), ("tune-1", "0.001 0.001 1\n")):
        live.shoal("wait", name, "--timeout", "60s", code=0)
        assert live.shoal("logs", name, code=0).stdout == text


def test_a_time_limit_warns_and_ends(live):
    script = "trap 'echo saved' USR1; while :; do sleep 0.1; done"
    failed = live.shoal(
        "run", "--name", "limited", "--time-limit", "3s", "--warn", "USR1@2s", "--", "bash", "-c", script, code=100
    )  # fmt: skip
    assert failed.stdout == "saved\n"
    assert "limited: failed: its time limit of 3 s is over" in failed.stderr


def test_events_can_be_watched_as_json_lines(live):
    watching = live.start("events", "-w", "-o", "json", "--type", "job.s", "-n", "1")
    live.shoal("run", "--name", "e1", "--", "true", code=0)
    number = live.json("show", "e1")["id"]
    seen = []
    while not any(e["type"] == "job.succeeded" and e["job"] == number for e in seen):
        seen.append(json.loads(watching.stdout.readline()))
    os.killpg(watching.pid, signal.SIGINT)
    watching.communicate(timeout=30)
    assert watching.returncode == 130


def test_ps_can_be_watched_without_a_terminal(live):
    watching = live.start("ps", "-w", "-o", "jsonl")
    live.shoal("run", "-d", "--name", "pw1", "--", "sleep", "600", code=0)
    while True:
        job = json.loads(watching.stdout.readline())
        if job["name"] == "pw1" and job["state"] == "running":
            break
    os.killpg(watching.pid, signal.SIGINT)
    watching.communicate(timeout=30)
    assert watching.returncode == 130
    live.shoal("cancel", "pw1", "-y", "--grace", "0s", code=0)


@pytest.mark.parametrize("name", ["logs", "wait", "show"])
def test_a_job_is_called_by_its_number_as_well(live, name):
    number = live.json("ps", "-a", "-n", "1")["items"][0]["id"]
    assert live.shoal(name, number).returncode in (0, 100, 103)


def test_a_detached_job_is_named_once_on_stdout_and_its_number_on_stderr(live):
    done = live.shoal("run", "-d", "--name", "once-1", "--", "true", code=0)
    assert done.stdout == "once-1\n"
    number = live.json("show", "once-1")["id"]
    assert done.stderr.splitlines()[0] == f"submitted as job {number}"
    many = live.shoal("run", "-d", "--array", "0-1", "--name", "once-2", "--", "true", code=0)
    assert many.stdout == "once-2\n"
    assert many.stderr.startswith("submitted as 2 jobs (")


def test_a_value_that_the_server_refuses_is_reported_at_its_place_in_the_file(live, tmp_path):
    path = tmp_path / "late.yaml"
    path.write_text("command: 'true'\ngpus: 1\ndeadline: 2020-01-31T08:00:00Z\n")
    refused = live.shoal("submit", "-d", "-f", path, code=7)
    where = f"{path}:3:11: deadline: it is in the past; give a time to come"
    assert refused.stderr == f"shoal: {where}\n"
    as_json = json.loads(live.shoal("submit", "-f", path, "-o", "json", code=7).stderr)["error"]
    assert (as_json["code"], as_json["mistakes"][0]["line"]) == ("invalid", 3)
    path.write_text("command: 'true'\nnot_before: 2999-01-31T08:00:00\n")
    assert ":2:13: not_before: the time has no time zone" in live.shoal("plan", "-f", path, code=7).stderr


def test_a_beginning_in_the_past_delays_nothing_and_is_said(live):
    early = ["--not-before", "2020-01-31T08:00"]
    done = live.shoal("run", "--name", "early", *early, "--", "echo", "begun", code=0)
    assert done.stdout == "begun\n"
    assert "not_before is in the past (2020-01-31 08:00:00 local time)" in done.stderr
    later = live.shoal("run", "-d", "--name", "later-2", "--not-before", "1h", "--", "true", code=0)
    assert "past" not in later.stderr
    live.shoal("cancel", "later-2", "-y", code=0)
