"""Job files: what is accepted, and that every mistake is found where it stands."""

import contextlib
import json
from pathlib import Path

import jsonschema_rs
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.client import jobfile
from shoal.client.errors import Rejected
from shoal.client.jobfile import JobFileError, at_its_place, job_spec, parse, with_settings
from shoal.core.errors import ShoalError

SCHEMA = Path(jobfile.__file__).parents[1] / "schemas" / "job.schema.json"

GOOD = [
    "command: python train.py",
    "command: [python, train.py, --epochs, 10, --lr, 1e-3]",
    "name: resnet-a\ncommand: x\ngpus: 1..8\nenv: {LR: 0.1, DEBUG: true}\nmax_restarts: 3",
    "command: x\ngpus: 4\nresize: never\nsecrets: {KEY: abc}\ngpu_types: [v100, p100]",
    "command: x\npriority: 3\nlabels: {run: 7, team: vision}\nafter: prepare\ntime_limit_s: 7200\nwarn_signal: USR1",
    "command: x\nafter: [12, {job: eval, on: any}]\nnot_before: 2030-01-01T08:00:00Z\ndeadline: 2030-01-02T08:00:00Z",
    "command: x --lr {lr}\nsweep: {lr: [0.1, 1e-2], aug: [true, false], model: [a, b]}\nmax_running: 4",
    "command: x\narray: 0-99%8",
    "command: x\narray: 7",
]
BAD = {
    "an unknown key": ("command: x\ngups: 4", 2, 1, "gups: there is no such key; did you mean 'gpus'?"),
    "a key twice": ("command: x\ngpus: 1\ngpus: 2", 3, 1, "'gpus' is given twice, first on line 2"),
    "a missing command": ("gpus: 1", 1, 1, "command: is missing"),
    "an upside-down range": ("command: x\ngpus: 8..1", 2, 7, "gpus: min 8 is above max 1"),
    "a range that is none": ("command: x\n\ngpus: two", 3, 7, "gpus: 'two' is not a number of GPUs"),
    "a name that climbs": ("command: x\nname: ../../etc", 2, 7, "name: may have letters, digits"),
    "a name that is a number": ("command: x\nname: 12", 2, 7, "name: a name must not be a number"),
    "a huge name": (f"command: x\nname: {'a' * 10_000}", 2, 7, "name: may have letters, digits"),
    "a wrong word": (
        "command: x\nresize: alive",
        2,
        9,
        "resize: Input should be 'live', 'restart' or 'never'",
    ),
    "a bad variable": ("command: x\nenv:\n  A-B: 1", 3, 8, "env.A-B: a variable's name has letters"),
    "an open bracket": ("command: [a, b\ngpus: 1", 2, 5, "not YAML"),
    "an open quote": ("command: 'x", 1, 12, "not YAML"),
    "an open quote in the command": ('command: python "x', 1, 10, "command: no closing quotation"),
    "a list": ("- command: x", 1, 1, "a job file is a list of `key: value` lines"),
    "a Python object": ("command: !!python/object:os.system x", 1, 10, "not YAML"),
    "an array of a million": ("command: x\narray: 0-999999", 2, 8, "array: 1,000,000 jobs are too many"),
    "a time limit of zero": (
        "command: x\ntime_limit_s: 0",
        2,
        15,
        "time_limit_s: Input should be greater than 0",
    ),
    "a job that waits for itself": ("command: x\nname: a\nafter: a", 3, 8, "after: a would wait for itself"),
    "two documents": ("command: x\n---\ncommand: y", 2, 1, "not YAML"),
}


@pytest.mark.parametrize("text", GOOD)
def test_a_good_file_fits_the_model_and_the_published_schema(text):
    document = parse(text)
    assert job_spec(document).command
    jsonschema_rs.validator_for(json.loads(SCHEMA.read_text())).validate(yaml.load(text, jobfile._Loader))


@pytest.mark.parametrize(("text", "line", "column", "message"), BAD.values(), ids=BAD.keys())
def test_a_mistake_is_reported_where_it_stands(text, line, column, message):
    with pytest.raises(JobFileError) as caught:
        job_spec(parse(text, source="job.yaml"))
    first = caught.value.mistakes[0]
    assert (first.line, first.column) == (line, column)
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"job.yaml:{line}:{column}: ")
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 7


def test_the_published_schema_is_that_of_the_model():
    assert json.loads(SCHEMA.read_text()) == jobfile.json_schema(), "write it again: see jobfile.json_schema"


def test_every_field_of_the_model_is_in_the_schema_and_unknown_ones_are_refused():
    from shoal.server.api.models import JobSpec

    schema = json.loads(SCHEMA.read_text())
    assert set(schema["properties"]) == {*JobSpec.model_fields, "env_from"}
    assert not jsonschema_rs.validator_for(schema).is_valid({"command": "x", "gups": 4})


def test_values_stay_as_they_are_written():
    spec = job_spec(
        parse("command: [a, 007, on, 1:30, 2026-01-01]\nenv: {A: 1e3, B: yes, C: 0x10, D: '', E: ~x}")
    )
    assert spec.command == ["a", "007", "on", "1:30", "2026-01-01"]
    assert spec.env == {"A": "1e3", "B": "yes", "C": "0x10", "D": "", "E": "~x"}


def test_all_mistakes_are_listed_and_the_typo_comes_before_what_it_made_missing():
    with pytest.raises(JobFileError) as caught:
        job_spec(parse("comand: x\nweight: -1\n"))
    assert [m.field for m in caught.value.mistakes] == ["comand", "weight", "command"]


def test_a_relative_workdir_is_seen_from_the_file(tmp_path):
    path = tmp_path / "jobs" / "a.yaml"
    path.parent.mkdir()
    path.write_text("command: x\nworkdir: ../code\n")
    assert job_spec(jobfile.read(path)).workdir == str(tmp_path / "code")
    path.write_text("command: x\n")
    assert job_spec(jobfile.read(path)).workdir == str(path.parent)


def test_settings_change_values_and_reach_into_mappings():
    document = with_settings(
        parse("command: x\ngpus: 1"), ["gpus=2..4", "env.LR=1e-3", "weight=2.5", "name=b"]
    )
    spec = job_spec(document)
    assert (spec.gpus, spec.env, spec.weight, spec.name) == ("2..4", {"LR": "1e-3"}, 2.5, "b")


@pytest.mark.parametrize("setting", ["gpus", "=3", "a..b=1", "gpus.x=1"])
def test_a_setting_that_is_none_says_how_to_write_one(setting):
    with pytest.raises(ShoalError, match="--set"):
        with_settings(parse("command: x\ngpus: 1"), [setting])


def test_a_file_of_100_mb_is_refused_without_reading_it(tmp_path):
    path = tmp_path / "huge.yaml"
    with path.open("wb") as file:
        file.truncate(100 << 20)
    with pytest.raises(JobFileError, match="larger than 256 kB") as caught:
        jobfile.read(path)
    assert caught.value.exit_code == 7


def test_an_endless_device_is_refused():
    with pytest.raises(JobFileError, match="larger than 256 kB"):
        jobfile.read("/dev/zero")


def test_a_file_that_is_not_there_or_no_text_says_so(tmp_path):
    with pytest.raises(ShoalError, match="no such file"):
        jobfile.read(tmp_path / "none.yaml")
    with pytest.raises(ShoalError, match="is a directory"):
        jobfile.read(tmp_path)
    (tmp_path / "x").write_bytes(b"command: x\nname: \xff\n")
    with pytest.raises(JobFileError, match="x:2: not UTF-8"):
        jobfile.read(tmp_path / "x")


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi")
)


@pytest.mark.parametrize("text", [BOMB, "a: &a [*a]", "[" * 50_000, "{a: " * 20_000], ids=lambda t: t[:12])
def test_a_file_made_to_explode_is_an_error_like_any_other(text):
    with pytest.raises(JobFileError):
        parse(text)


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=200))
def test_no_text_whatever_ends_in_anything_but_a_job_or_a_clear_error(text):
    with contextlib.suppress(JobFileError):
        job_spec(parse(text))


def test_what_the_server_refuses_is_found_also_within_a_list():
    document = parse("command: x\nafter:\n  - 12\n  - {job: evil, on: any}\n", source="job.yaml")
    with pytest.raises(JobFileError) as refused, at_its_place(document):
        raise Rejected("spec.after.1.job: there is no job evil", field="spec.after.1.job")
    assert str(refused.value) == "job.yaml:4:11: after.1.job: there is no job evil"
