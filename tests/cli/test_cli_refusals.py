"""Bad input: each a clear line and its exit code, and nothing lost."""

import getpass
import socket

import pytest


def refused(done, code, *words):
    assert done.returncode == code, f"{done.returncode}: {done.stdout} {done.stderr}"
    assert done.stdout == ""
    assert done.stderr.startswith("shoal: ")
    assert done.stderr.count("\n") == 1, done.stderr
    for word in words:
        assert word in done.stderr, done.stderr


def test_a_job_that_can_never_fit_is_refused_with_the_largest_that_could(live):
    refused(live.shoal("run", "--gpus", "64", "--", "true"), 7, "64", "4")
    refused(live.shoal("run", "--gpus", "1", "--name", "a b", "--", "true"), 7, "name")


@pytest.mark.parametrize("name", ["../../etc/passwd", "a/b", "x" * 10_000, "a\x01b", "-x", "12", "ü", ".."])
def test_names_that_try_to_escape_are_refused(live, name):
    refused(live.shoal("run", f"--name={name}", "--", "true"), 7, "name")


@pytest.mark.parametrize("name", ["../users", "a%2f..", "x" * 10_000, "a b", "a?x=1"])
def test_such_names_find_no_job_either(live, name):
    refused(live.shoal("show", name), 3, "there is no")


def test_a_job_file_with_a_mistake_is_refused_with_line_and_column(live, tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text("command: x\ngups: 4\n")
    refused(
        live.shoal("submit", "-f", path), 7, f"{path}:2:1: gups: there is no such key; did you mean 'gpus'?"
    )
    refused(live.shoal("plan", "-f", path), 7, ":2:1:")
    refused(live.shoal("submit", "-f", tmp_path / "none.yaml"), 2, "no such file")
    with (tmp_path / "huge.yaml").open("wb") as file:
        file.truncate(100 << 20)
    refused(live.shoal("submit", "-f", tmp_path / "huge.yaml", timeout=20), 7, "larger than 256 kB")


def test_a_token_that_is_not_valid_is_refused_without_saying_why(live, tmp_path):
    (tmp_path / "t").write_text("nonsense")
    invalid = live.shoal("ps", "--token-file", tmp_path / "t")
    refused(invalid, 4, "token")
    refused(live.shoal("ps", "--token-file", tmp_path / "none"), 4, "no such file")


def test_users_see_and_touch_their_own_jobs_only(live, tmp_path):
    for name, role in (("ada", "user"), ("ben", "user"), ("vic", "viewer")):
        live.shoal("user", "create", name, "--role", role, "--account", getpass.getuser(), code=0)
        (tmp_path / name).write_text(live.shoal("token", "create", "--user", name, code=0).stdout)

    def as_(name, *args):
        return live.shoal(*args, env={"SHOAL_TOKEN_FILE": str(tmp_path / name)})

    assert as_("ada", "run", "-d", "--name", "of-ada", "--", "sleep", "600").returncode == 0
    assert as_("ada", "show", "of-ada").returncode == 0
    refused(as_("ben", "show", "of-ada"), 3)
    refused(as_("ben", "cancel", "of-ada", "-y"), 3)
    assert as_("vic", "show", "of-ada").returncode == 0
    refused(as_("vic", "cancel", "of-ada", "-y"), 4)
    refused(as_("ben", "user", "create", "mallory"), 4)
    refused(as_("ben", "policy", "set", "fifo"), 4)
    refused(as_("vic", "run", "--", "true"), 4)
    assert as_("ada", "cancel", "of-ada", "-y", "--grace", "0s").returncode == 0


def test_a_job_in_the_wrong_state_is_a_conflict(live):
    live.shoal("run", "--name", "over", "--", "true", code=0)
    refused(live.shoal("pause", "over"), 5)
    refused(live.shoal("scale", "over", "--max", "2"), 5)


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (["ps", "-s", "runing"], "did you mean 'running'?"),
        (["ps", "--since", "yesterday"], "is not a duration"),
        (["wait", "x", "--for", "ever"], "write done, running"),
        (["wait", "x", "--timeout", "soon"], "is not a duration"),
        (["logs", "x", "--rank", "first"], "--rank first"),
        (["scale", "x"], "give --min, --max or --pin"),
        (["scale", "x", "--min", "5", "--max", "2"], "min 5 is above max 2"),
        (["scale", "x", "--max", "0"], "greater than or equal to 1"),
        (["user", "create", "x", "--role", "king", "--account", "root"], "role"),
        (["user", "set", "admin", "--tickets", "-1"], "tickets"),
        (["user", "create", "x", "--account", "no-such-account-here"], "no-such-account-here"),
        (["group", "create", "a b"], "name"),
        (["policy", "set", "max-min", "--option", "x"], "write NAME=value"),
        (["user", "set", "admin"], "give --role, --tickets, --group, --account or a limit"),
        (["run", "--env", "NOT_THERE", "--", "true"], "the variable is not set here"),
        (["ps", "-o", "jsn"], "jsn"),
        (["pss"], "did you mean 'ps'?"),
        (["run"], "Missing argument"),
        (["up", "--gpus", "-1"], "not in the range x>=0"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_usage_is_exit_code_2_and_says_what_to_write(live, args, word):
    refused(live.shoal(*args), 2, word)


def test_unknown_policies_and_options_are_refused_with_a_suggestion(live):
    refused(live.shoal("policy", "set", "max-mim"), 2, "did you mean 'max-min'?")
    refused(live.shoal("policy", "set", "max-min", "--option", "nope=1"), 2, "nope")
    refused(live.shoal("policy", "show", "max-mim"), 2, "did you mean 'max-min'?")
    assert live.json("policy", "get")["name"] == "max-min"


def test_two_servers_on_one_home_and_other_wishes_for_the_one_that_runs(live):
    assert "already up" in live.shoal("up", code=0).stderr
    refused(live.shoal("up", "--gpus", "7"), 5, "shoal down")
    refused(live.shoal("up", "--policy", "fifo"), 5, "shoal policy set fifo")
    refused(live.shoal("up", "--port", "4711"), 5, "--port")


def test_the_database_of_the_server_that_runs_may_be_named_again(nowhere):
    url = f"sqlite:///{nowhere.home}/other.db"
    used = {"SHOAL_DATABASE": url}
    nowhere.shoal("up", "--gpus", "1", env=used, code=0)
    assert "already up" in nowhere.shoal("up", env=used, code=0).stderr
    assert "already up" in nowhere.shoal("up", "--database", url, code=0).stderr
    refused(nowhere.shoal("up", env={"SHOAL_DATABASE": f"{url}2"}), 5, "--database")


def test_a_server_whose_first_admin_was_deleted_says_which_token_it_needs(nowhere):
    nowhere.up(gpus=1)
    nowhere.shoal("user", "create", "boss", "--role", "admin", "--account", getpass.getuser(), code=0)
    boss = {"SHOAL_TOKEN": nowhere.shoal("token", "create", "--user", "boss", code=0).stdout.strip()}
    nowhere.shoal("user", "rm", "admin", "-y", env=boss, code=0)
    needs = "admin.token is not valid any more; set SHOAL_TOKEN to your token"
    up = nowhere.shoal("up", code=0)
    assert up.stdout.startswith("http://")
    assert "shoal is already up" in up.stderr
    assert needs in up.stderr
    refused(nowhere.shoal("up", "--gpus", "2"), 4, needs)
    refused(nowhere.shoal("ps"), 4, needs)
    refused(nowhere.shoal("down", "-y"), 4, needs)
    assert "is already up: 1 virtual GPUs" in nowhere.shoal("up", env=boss, code=0).stderr
    nowhere.shoal("down", "-y", env=boss, code=0)
    started = nowhere.shoal("up", code=0)
    assert "shoal is up, but does not show its settings" in started.stderr
    nowhere.shoal("down", "-y", env=boss, code=0)


def test_options_of_a_policy_that_is_not_named_are_refused(nowhere):
    refused(nowhere.shoal("up", "--gpus", "1", "--policy-option", "quantum_s=1"), 2, "needs --policy")


def test_a_port_in_use_is_a_conflict(nowhere):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = nowhere.shoal("up", "--gpus", "1", "--port", taken.getsockname()[1])
    refused(done, 5, "in use")


def test_a_home_of_a_newer_version_is_left_alone(nowhere):
    nowhere.home.mkdir(parents=True)
    (nowhere.home / "format").write_text("999\n")
    refused(nowhere.shoal("up", "--gpus", "1"), 5, "upgrade")
    assert (nowhere.home / "format").read_text() == "999\n"


def test_a_home_that_cannot_be_made_says_so(nowhere, tmp_path):
    (tmp_path / "file").write_text("")
    refused(nowhere.shoal("up", "--gpus", "1", "--home", tmp_path / "file" / "home"), 2, "not a directory")
