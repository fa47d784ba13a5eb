"""Names of arrays in commands about jobs, and lists of their jobs."""

import getpass
import json

import pytest


@pytest.fixture(scope="module")
def sweep(live):
    """Three jobs: two succeed, the last one fails."""
    script = "echo task {index}; test {index} != 2"
    live.shoal("run", "-d", "--array", "0-2", "--name", "sweep", "--", "sh", "-c", script, code=0)
    return live


def test_wait_waits_for_all_jobs_of_an_array_and_fails_if_one_failed(sweep):
    done = sweep.shoal("wait", "sweep", "--timeout", "60s", code=100)
    assert done.stderr == "sweep: 2 succeeded, 1 failed\n"
    over = json.loads(sweep.shoal("wait", "sweep", "-o", "json", code=100).stdout)
    assert over["jobs"] == {"succeeded": 2, "failed": 1}
    other = sweep.shoal("wait", "sweep", "--for", "running", code=2)
    assert "sweep is an array" in other.stderr


def test_an_array_whose_jobs_are_not_over_is_waited_for_until_the_time_out(live):
    live.shoal("run", "-d", "--array", "0-1", "--name", "slow", "--", "sleep", "600", code=0)
    late = live.shoal("wait", "slow", "--timeout", "300ms", code=124)
    assert "2 jobs of slow are not over" in late.stderr
    waiting = live.start("wait", "slow")
    live.shoal("cancel", "slow", "-y", "--grace", "0s", code=0)
    assert waiting.wait(60) == 103
    assert "slow: 2 cancelled" in waiting.communicate()[1]


def test_show_tells_how_the_jobs_of_an_array_are(sweep):
    sweep.shoal("wait", "sweep", "--timeout", "60s", code=100)
    shown = sweep.shoal("show", "sweep", code=0)
    assert "3 jobs" in shown.stdout
    assert "2 succeeded, 1 failed" in shown.stdout
    assert "shoal show sweep-0" in shown.stderr
    assert sweep.json("show", "sweep")["tasks"] == 3


@pytest.mark.parametrize(
    "command",
    [["logs"], ["why"], ["events"], ["profile"], ["scale", "--max", "2"], ["exec"]],
    ids=lambda c: c[0],
)
def test_commands_about_one_job_name_a_job_of_the_array(sweep, command):
    after = ["--", "true"] if command == ["exec"] else []
    refused = sweep.shoal(command[0], "sweep", *command[1:], *after, code=2)
    assert (
        f"sweep is an array of 3 jobs; name one of them, as in `shoal {command[0]} sweep-" in refused.stderr
    )
    assert refused.stderr.count("\n") == 1


def test_a_number_is_never_that_of_an_array(sweep, tmp_path):
    """The array of a user has the number of somebody else's job."""
    sweep.shoal("user", "create", "cas", "--account", getpass.getuser(), code=0)
    (tmp_path / "cas").write_text(sweep.shoal("token", "create", "--user", "cas", code=0).stdout)
    cas = {"SHOAL_TOKEN_FILE": str(tmp_path / "cas")}
    held = ["run", "-d", "--array", "0-1", "--name", "of-cas", "--not-before", "1h", "-o", "json"]
    array = json.loads(sweep.shoal(*held, "--", "true", env=cas, code=0).stdout)["id"]
    assert sweep.json("show", array)["user"] == "admin"
    for command in (["show"], ["cancel", "-y"], ["wait"]):
        refused = sweep.shoal(*command, array, env=cas, code=3)
        assert f"there is no job '{array}'" in refused.stderr
    assert json.loads(sweep.shoal("show", "of-cas", "-o", "json", env=cas).stdout)["jobs"] == {"pending": 2}
    sweep.shoal("cancel", "of-cas", "-y", env=cas, code=0)


def test_a_list_of_one_array_has_its_finished_jobs_too(sweep):
    sweep.shoal("wait", "sweep", "--timeout", "60s", code=100)
    names = [job["name"] for job in sweep.json("ps", "--array", "sweep")["items"]]
    assert sorted(names) == ["sweep-0", "sweep-1", "sweep-2"]
    failed = sweep.json("ps", "--array", "sweep", "-s", "failed")["items"]
    assert [job["name"] for job in failed] == ["sweep-2"]


def test_a_list_for_a_user_who_does_not_exist_says_so(live):
    assert "there is no user 'nosuch'" in live.shoal("ps", "-u", "nosuch", code=3).stderr
    assert "there is no user" in live.shoal("ps", "-u", "no such", code=3).stderr
    live.shoal("ps", "-u", "admin", code=0)


@pytest.mark.parametrize("more", [[], ["-f"]], ids=["", "follow"])
def test_logs_of_a_rank_that_a_job_never_had_are_refused_with_its_ranks(live, more):
    name = "two" + "".join(more)
    live.shoal("run", "--name", name, "--gpus", "2", "--per-gpu", "--", "sh", "-c", "echo I am $RANK", code=0)
    refused = live.shoal("logs", name, "--rank", "77", *more, code=2)
    assert refused.stderr == f"shoal: --rank 77: {name} has ranks 0 to 1\n"
    assert live.shoal("logs", name, "--rank", "1", *more, code=0).stdout == "[1] I am 1\n"


def test_logs_of_a_rank_that_a_waiting_job_cannot_get_are_refused(live):
    live.shoal("run", "-d", "--name", "later", "--gpus", "2", "--not-before", "1h", "--", "true", code=0)
    refused = live.shoal("logs", "later", "--rank", "2", code=2)
    assert "later has no workers yet, and can get ranks 0 to 1" in refused.stderr
    live.shoal("logs", "later", "--rank", "1", code=0)
    live.shoal("cancel", "later", "-y", code=0)
