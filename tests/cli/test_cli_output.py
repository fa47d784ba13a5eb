"""Every command's output against a real server: one document that fits its schema, or a clear error."""

import json
from importlib import import_module

import jsonschema_rs
import pytest
import yaml
from live_cluster import eventually

from shoal.cli.commands import COMMANDS
from shoal.server.api import models as m


@pytest.fixture(scope="module")
def done(live):
    """A job that is over."""
    live.shoal("run", "--name", "done", "--", "echo", "hello", code=0)
    return "done"


@pytest.fixture(scope="module")
def waiting(live):
    """A job that is held by its owner."""
    live.shoal("run", "-d", "--name", "waiting", "--gpus", "2", "--", "sleep", "600", code=0)
    live.shoal("wait", "waiting", "--for", "running", "--timeout", "30s", code=0)
    live.shoal("pause", "waiting", code=0)
    yield "waiting"
    live.shoal("cancel", "waiting", "--grace", "0s")


def job_file(tmp_path, **changes):
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump({"command": ["true"], **changes}))
    return path


READ = {
    "status": (["status"], m.Status),
    "doctor": (["doctor"], m.Doctor),
    "ps": (["ps"], m.JobList),
    "ps -a": (["ps", "-a"], m.JobList),
    "ps of no job": (["ps", "-l", "no=job"], m.JobList),
    "ps by state": (["ps", "-s", "succeeded,failed"], m.JobList),
    "ps since": (["ps", "-a", "--since", "2h", "-n", "1"], m.JobList),
    "ps --mine": (["ps", "--mine"], m.JobList),
    "show": (["show", "done"], m.Job),
    "why of a job that waits": (["why", "waiting"], m.Why),
    "why of a job that is over": (["why", "done"], m.Why),
    "why at a time": (["why", "waiting", "--at", "0s"], m.Why),
    "why, who took its GPUs": (["why", "waiting", "--preempted"], m.Why),
    "profile": (["profile", "waiting"], m.Profile),
    "node ls": (["node", "ls"], m.NodeList),
    "node show": (["node", "show", "local"], m.Node),
    "logs": (["logs", "done"], m.LogPage),
    "logs of an attempt": (["logs", "done", "--attempt", "0"], m.LogPage),
    "events": (["events"], m.EventList),
    "events of a job": (["events", "done", "--type", "job."], m.EventList),
    "events of no type": (["events", "--type", "none."], m.EventList),
    "shares": (["shares"], m.ShareList),
    "shares over a time": (["shares", "--over", "7d"], m.ShareList),
    "events of a user": (["events", "user/admin"], m.EventList),
    "policy get": (["policy", "get"], m.Policy),
    "user ls": (["user", "ls"], m.UserList),
    "user show": (["user", "show", "admin"], m.User),
    "token ls": (["token", "ls"], m.TokenList),
    "group ls": (["group", "ls"], m.GroupList),
    "notify ls": (["notify", "ls"], m.WebhookList),
    "wait": (["wait", "done"], m.Job),
}


@pytest.mark.parametrize(("args", "model"), READ.values(), ids=READ.keys())
def test_json_is_one_document_that_fits_its_schema(live, done, waiting, args, model):
    document = live.json(*args)
    jsonschema_rs.validator_for(model.model_json_schema(mode="serialization")).validate(document)
    model.model_validate(document)


@pytest.mark.parametrize("output", ["table", "wide", "jsonl", "yaml", "name"])
@pytest.mark.parametrize(
    "args", [["ps", "-a"], ["show", "done"], ["events"], ["shares"], ["status"]], ids=" ".join
)
def test_every_other_form_can_be_read_too(live, done, waiting, args, output):
    text = live.shoal(*args, "-o", output, code=0).stdout
    assert text.strip()
    assert "\x1b" not in text
    if output == "jsonl":
        assert all(isinstance(json.loads(line), dict) for line in text.splitlines())
    if output == "yaml":
        assert isinstance(yaml.safe_load(text), dict)
    if output == "table" and args[0] == "ps":
        assert max(map(len, text.splitlines())) <= 100


CHANGE = {
    "run": (
        ["run", "-d", "--name", "c1", "--gpus", "1..2", "--resize", "restart", "--", "sleep", "600"],
        m.Job,
    ),
    "scale": (["scale", "c1", "--pin", "1"], m.Job),
    "pause": (["pause", "c1"], m.JobList),
    "resume": (["resume", "c1"], m.JobList),
    "cancel": (["cancel", "c1", "--grace", "0s"], m.JobList),
    "user create": (["user", "create", "eve", "--tickets", "2"], m.User),
    "group create": (["group", "create", "vision", "--max-gpus", "3", "--tickets", "2"], m.Group),
    "group set": (["group", "set", "vision", "--tickets", "none", "--gpu-hours", "50"], m.Group),
    "group show": (["group", "show", "vision"], m.Group),
    "user set": (
        [
            "user",
            "set",
            "eve",
            "--tickets",
            "3",
            "--role",
            "viewer",
            "--group",
            "vision",
            "--max-running",
            "2",
        ],
        m.User,
    ),
    "token create": (
        ["token", "create", "--user", "eve", "--label", "laptop", "--expires", "1h"],
        m.TokenCreated,
    ),
    "policy set": (["policy", "set", "max-min"], m.Policy),
    "node drain": (["node", "drain", "local"], m.Node),
    "node uncordon": (["node", "uncordon", "local"], m.Node),
    "up again": (["up"], m.Status),
}


def test_commands_that_change_something_answer_with_what_they_changed(live):
    for args, model in CHANGE.values():
        rest = args.index("--") if "--" in args else len(args)
        text = live.shoal(*args[:rest], "-o", "json", *args[rest:], code=0).stdout
        document = json.loads(text)
        jsonschema_rs.validator_for(model.model_json_schema(mode="serialization")).validate(document)
    eve, group = live.json("user", "show", "eve"), live.json("group", "show", "vision")
    assert (eve["tickets"], eve["group"], eve["limits"]["max_running_jobs"]) == (3, "vision", 2)
    assert (group["tickets"], group["users"], group["limits"]["max_gpus"]) == (None, ["eve"], 3)
    live.shoal("group", "rm", "vision", "-y", code=5)
    live.shoal("user", "rm", "eve", "-y", code=0)
    live.shoal("user", "show", "eve", code=3)
    live.shoal("group", "rm", "vision", "-y", code=0)


def test_plan_answers_with_its_verdict_and_changes_nothing(live, tmp_path):
    eventually(lambda: not live.json("ps", "-s", "pending,starting,running,stopping")["items"])
    jobs = [job["id"] for job in live.json("ps", "-a")["items"]]
    last_event = live.json("status")["last_event"]
    for _ in range(2):  # if the first had taken the GPUs, the second would have to wait
        outcome = live.json("plan", "-f", job_file(tmp_path, gpus=4))
        assert m.PlanOutcome.model_validate(outcome).verdict == "starts"
        assert outcome["gpus"] == 4
    never = live.shoal("plan", "-f", job_file(tmp_path, gpus=64), "-o", "json", code=12)
    assert m.PlanOutcome.model_validate_json(never.stdout).verdict == "infeasible"
    assert [job["id"] for job in live.json("ps", "-a")["items"]] == jobs
    assert live.json("status")["last_event"] == last_event, "not even an event tells of it"
    assert live.json("status")["used_gpus"] == 0


def test_plan_says_who_would_shrink_and_who_would_wait(live, tmp_path):
    live.shoal("policy", "set", "fifo", code=0)
    live.shoal("run", "-d", "--name", "holder", "--gpus", "3", "--", "sleep", "600", code=0)
    live.shoal("wait", "holder", "--for", "running", "--timeout", "30s", code=0)
    try:
        waits = live.shoal("plan", "-f", job_file(tmp_path, gpus=2), "-o", "json", code=10)
        assert json.loads(waits.stdout)["reason"]["code"] == "WaitingForCapacity"
        live.shoal("plan", "-f", job_file(tmp_path, gpus=1), code=0)
    finally:
        live.shoal("cancel", "holder", "--grace", "0s", code=0)
        live.shoal("policy", "set", "max-min", code=0)


def test_quiet_is_without_words_and_no_color_without_colours(live):
    assert live.shoal("--quiet", "ps", "-l", "no=job", code=0).stderr == ""
    assert "no job" in live.shoal("--quiet", "show", "none-such", code=3).stderr, "errors are always said"
    assert live.shoal("--no-color", "--quiet", "ps", "-a", code=0).stdout.startswith("NAME")


def test_without_a_job_the_answer_is_an_empty_list_and_words_go_to_stderr(live):
    assert live.json("ps", "-l", "no=job") == {"items": [], "next": None}
    quiet = live.shoal("ps", "-l", "no=job", code=0)
    assert quiet.stdout == ""
    assert "no unfinished jobs" in quiet.stderr


@pytest.mark.parametrize(
    "args",
    [
        ["show"],
        ["why"],
        ["why", "--at", "1h"],
        ["profile"],
        ["checkpoint"],
        ["logs"],
        ["logs", "-f"],
        ["wait"],
        ["events"],
        ["pause"],
        ["resume"],
        ["cancel", "-y"],
    ],
    ids=" ".join,
)
def test_a_job_that_is_not_there_is_exit_code_3_and_one_object_on_stderr(live, args):
    found = live.shoal(args[0], "none-such", *args[1:], "-o", "json", code=3)
    assert found.stdout == ""
    error = json.loads(found.stderr)["error"]
    assert (error["code"], error["exit_code"]) == ("not_found", 3)
    plain = live.shoal(args[0], "none-such", *args[1:], code=3)
    assert plain.stderr.startswith("shoal: ")
    assert plain.stderr.count("\n") == 1


def test_without_a_server_every_command_says_so_in_one_line_with_exit_code_6(nowhere):
    for args in (
        ["ps"],
        ["why", "a"],
        ["status"],
        ["run", "--", "true"],
        ["policy", "set", "fifo"],
        ["user", "ls"],
    ):
        found = nowhere.shoal(*args, code=6)
        assert "shoal up" in found.stderr
        assert found.stderr.count("\n") == 1
    assert nowhere.shoal("down", code=0).stderr.startswith("no server runs on ")
    assert json.loads(nowhere.shoal("doctor", "-o", "json", code=1).stdout)["healthy"] is False


#: Commands whose `-o json` is tried elsewhere, or which have no answer but an exit code.
ELSEWHERE = {
    "submit": "test_cli_jobs", "plan": "here", "checkpoint": "test_e2e_elastic", "version": "here",
    "policy ls": "here", "policy show": "here", "sim": "tests/sim", "completion": "for a shell",
    "down": "an exit code", "user rm": "an exit code", "token rm": "an exit code", "group rm": "an exit code",
    "agent": "tests/cluster", "node add": "tests/cluster", "node rm": "an exit code",
    "node join-token": "tests/cluster", "notify add": "tests/server/test_notify.py",
    "notify test": "an exit code", "notify rm": "an exit code",
    "exec": "tests/cli/test_cli_exec.py",
}  # fmt: skip


def test_the_json_of_every_command_is_tried():
    groups = {
        name: import_module(where.split(":")[0]).COMMANDS
        for name, (where, _) in COMMANDS.items()
        if where.endswith(":GROUP")
    }
    every = {f"{group} {verb}" for group, verbs in groups.items() for verb in verbs if group != "sim"}
    every |= {name for name in COMMANDS if name not in groups} | {"sim"}
    tried = {tuple(args[:2]) for args, _ in (*READ.values(), *CHANGE.values())}
    found = {words[0] for words in tried} | {" ".join(words) for words in tried}
    assert every - found == set(ELSEWHERE)


def test_version_and_the_list_of_policies_are_documents_too(live, nowhere):
    assert live.json("version")["server"] == live.json("version")["client"]
    assert nowhere.json("version")["server"] is None
    items = m.PolicyInfoList.model_validate(nowhere.json("policy", "ls")).items
    assert {"fifo", "max-min"} <= {item.name for item in items}
    shown = m.Policy.model_validate(nowhere.json("policy", "show", "gandiva-fair"))
    assert (shown.elastic, shown.options["quantum_s"]) == (False, 60.0)


def test_every_command_has_help_that_says_what_it_does(nowhere):
    for name, (_, summary) in COMMANDS.items():
        assert summary[0].isupper()
        assert nowhere.shoal(name, "--help", code=0).stdout.startswith(f"Usage: shoal {name}")


def test_shells_complete_commands_policies_and_names_of_jobs(live, done, waiting):
    def completed(words, index):
        env = {"_SHOAL_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(index)}
        return [line.removeprefix("plain,") for line in live.shoal(env=env).stdout.split()]

    assert {"ps", "pause", "plan", "policy"} <= set(completed("shoal p", 1))
    assert "max-min" in completed("shoal policy set m", 3)
    assert completed("shoal why wai", 2) == ["waiting"]
    for shell in ("bash", "zsh", "fish"):
        assert "shoal" in live.shoal("completion", shell, code=0).stdout
