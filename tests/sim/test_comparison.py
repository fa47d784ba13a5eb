"""`shoal sim run` and `compare` tell what was run, and lose nothing that is known when something is wrong."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from shoal.cli.main import main
from shoal.cli.sim_compare import label_all
from shoal.cli.sim_paper import fitted
from shoal.cli.sim_ranking import show


def shoal(capsys, *args):
    """(exit code, stdout, stderr)"""
    with pytest.raises(SystemExit) as stopped:
        main([str(arg) for arg in args])
    said = capsys.readouterr()
    return stopped.value.code, said.out, said.err


MINE = """
import os, signal
from shoal.core.errors import ShoalError
from shoal.policies.fifo import Fifo

class Mine(Fifo):
    name = summary = "mine"

    def shares(self, view, gpus, now_s):
        {first}
"""


@pytest.mark.parametrize(
    ("first", "code", "told"),
    [
        ("raise RuntimeError('none')", 2, "mine failed: policy 'mine' failed at"),
        ("raise ShoalError('not today')", 2, "mine failed: not today"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 1, "mine failed: a process of this comparison was killed"),
    ],
    ids=["a mistake of another package", "an error one can act on", "a process that is killed"],
)
@pytest.mark.parametrize("output", ["table", "json"])
def test_runs_that_ended_are_told_though_another_failed(tmp_path, first, code, told, output):
    (tmp_path / "mine.py").write_text(MINE.format(first=first))
    about = tmp_path / "mine-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[shoal.policies]\nmine = mine:Mine\n")
    words = f"sim compare --sample --workers 1 --policies fifo,mine -o {output}"
    ran = subprocess.run(
        [sys.executable, "-m", "shoal.cli.main", *words.split()],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == code
    assert "Traceback" not in ran.stderr
    last = ran.stderr.splitlines()[-1]
    if output == "table":
        assert [line.split()[0] for line in ran.stdout.splitlines()] == ["policy", "fifo"]
        assert last.startswith(f"shoal: {told}")
    else:
        document, error = json.loads(ran.stdout), json.loads(last)["error"]
        assert [run["label"] for run in document["items"]] == ["fifo"]
        assert [run["label"] for run in document["failed"]] == ["mine"]
        assert error["message"].startswith(told)
        assert error["exit_code"] == code


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("compare --policies fifo,afs-p --option tie=zz", "option tie"),
        ("compare --policies fifo,afs-p --option quantum_s=0.1", "1 second or more"),
        (
            "run --costs none,restart",
            "--costs none,restart: a run takes one; `shoal sim compare` takes several",
        ),
        ("run --policy fifo,srtf", "--policy fifo,srtf: a run takes one"),
    ],
)
def test_what_no_run_can_do_is_told_before_the_first_one(words, part, capsys, monkeypatch):
    monkeypatch.setattr("shoal.cli.sim_processes.run_all", lambda *_, **__: pytest.fail("it ran"))
    code, out, err = shoal(capsys, "sim", *words.split(), "--sample")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert part in err


def test_an_error_is_one_object_for_a_machine_with_the_place_where_it_is_known(tmp_path, capsys):
    jobs = tmp_path / "jobs.csv"
    jobs.write_text("submit_s,model,iterations,requested_gpus,max_gpus\n0,net,100,1,1\n0,net,-1,1,1\n")
    (tmp_path / "profiles.csv").write_text("model,gpus,seconds_per_iteration\nnet,1,2\n")
    for verb in ("run", "compare"):
        code, out, err = shoal(capsys, "sim", verb, jobs, "--gpus", 4, "-o", "json")
        error = json.loads(err)["error"]
        assert (code, out, error["exit_code"]) == (2, "", 2)
        assert (error["file"], error["line"], error["field"]) == (str(jobs), 3, "iterations")


@pytest.mark.parametrize(
    "words",
    ["run --sample --policy nosuch", "compare --sample --policies nosuch", "paper nosuch"],
)
def test_errors_without_a_place_are_objects_too_and_lines_for_people(words, capsys):
    _, _, err = shoal(capsys, "sim", *words.split(), "-o", "json")
    error = json.loads(err)["error"]
    assert "nosuch" in error["message"]
    assert "file" not in error
    assert shoal(capsys, "sim", *words.split())[2] == f"shoal: {error['message']}\n"


@pytest.mark.parametrize(
    "policies", ["--policies fifo,srtf,fifo", "--policy fifo --policies srtf --policy fifo"]
)
def test_a_word_that_is_named_twice_runs_once_and_it_is_said(capsys, monkeypatch, policies):
    seen = []

    def run_all(setups, labels, *_, **__):
        seen.extend(labels)
        raise KeyboardInterrupt

    monkeypatch.setattr("shoal.cli.sim_processes.run_all", run_all)
    words = f"compare --sample {policies} --costs none,none"
    _, _, err = shoal(capsys, "sim", *words.split())
    assert seen == ["fifo", "srtf"]
    assert "--policies: fifo is given 2 times and runs once\n" in err
    assert "--costs: none is given 2 times and runs once\n" in err


def test_a_run_without_a_search_has_the_word_that_was_typed():
    one = SimpleNamespace(
        policy="afs-p", costs=SimpleNamespace(kind="none"), knowledge="true", placement="auto", autoscale=""
    )
    other = SimpleNamespace(**{**vars(one), "autoscale": "efficiency"})
    assert label_all([one, other]) == ["afs-p / none", "afs-p / efficiency"]


def test_the_table_of_a_run_tells_what_was_run(capsys):
    _, out, _ = shoal(capsys, "sim", "run", "--sample", "--policy", "fifo")
    assert out.splitlines()[0] == "fifo on the sample: 300 jobs, 64 GPUs"
    words = (
        "run --sample --policy fifo --option backfill=no --costs restart --seed 3 --whole-seconds --gpus 128"
    )
    _, out, _ = shoal(capsys, "sim", *words.split())
    assert out.splitlines()[0] == (
        "fifo on the sample: 300 jobs, 128 GPUs, backfill=no, costs restart, seed 3, whole-seconds"
    )


def test_the_table_of_a_run_that_was_cut_short_has_no_makespan_and_tells_how_far_it_came(capsys, monkeypatch):
    monkeypatch.setattr(
        "shoal.cli.sim_progress.Watch.of", lambda *_: lambda now_s, done, total: now_s < 40_000
    )
    _, out, err = shoal(capsys, "sim", "run", "--sample", "--policy", "fifo")
    rows = [line.split("  ") for line in out.splitlines()]
    assert rows[1][0].startswith("fifo (to 1")
    assert [row[-1].strip() for row in rows if row[0] == "makespan"] == ["-"]
    assert "interrupted" in err


def test_a_comparison_with_costs_tells_how_long_jobs_stood_still(capsys):
    show([figures_of("afs-l", 3600.0, 86_400.0), figures_of("fifo", 7200.0, 86_400.0)])
    assert "standstill" in capsys.readouterr().out
    show([{**figures_of("fifo", 7200.0, 86_400.0), "avg_paused_s": 0.0}])
    assert "standstill" not in capsys.readouterr().out


def figures_of(label, avg_jct_s, makespan_s, interrupted=False):
    """Of a run in which no job finished if there is no average."""
    of_finished = None if avg_jct_s is None else 1.0
    names = ("p50_jct_s", "p99_jct_s", "avg_queue_s", "avg_paused_s", "share_changes_per_job")
    return {
        "label": label, "avg_jct_s": avg_jct_s, "interrupted": interrupted,
        "makespan_s": None if interrupted else makespan_s, "simulated_s": makespan_s,
        "finish_time_fairness": {"max": of_finished}, **dict.fromkeys(names, of_finished),
        "utilization": 1.0, "wall_s": 1.0,
    }  # fmt: skip


def test_a_comparison_ranks_no_run_that_was_cut_short(capsys):
    show(
        [
            figures_of("srtf", 60.0, 22_320.0, interrupted=True),
            figures_of("fifo", 7200.0, 86_400.0),
            figures_of("themis", None, 40.0, interrupted=True),
            figures_of("afs-l", 3600.0, 86_400.0),
        ]
    )
    rows = [re.split(r"\s{2,}", line.strip()) for line in capsys.readouterr().out.splitlines()]
    columns = ("policy", "vs best", "makespan", "changes/job", "worst rho")
    where = {name: rows[0].index(name) for name in columns}
    seen = [tuple(row[i] for i in where.values()) for row in rows[1:]]
    assert seen == [
        ("afs-l", "1.00x", "1d 0h", "1.0", "1.0"),
        ("fifo", "2.00x", "1d 0h", "1.0", "1.0"),
        ("srtf (to 6h 12m)", "-", "-", "1.0", "1.0"),
        ("themis (to 40s)", "-", "-", "-", "-"),
    ]


@pytest.fixture
def eighty(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


def test_a_narrow_comparison_with_costs_keeps_the_standstill_and_tells_where_the_rest_is(eighty, capsys):
    show([figures_of(f"afs-p / {kind}", 3600.0, 86_400.0) for kind in ("none", "restart", "concurrent")])
    told = capsys.readouterr()
    assert max(map(len, told.out.splitlines())) <= 80
    assert "standstill" in told.out
    assert "terminal is too narrow: vs best, p50" in told.err
    assert "(-o json has all)" in told.err


def test_what_fits_is_not_left_out(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    show([figures_of("afs-p", 3600.0, 86_400.0)])
    told = capsys.readouterr()
    assert "took" in told.out
    assert told.err == ""


@pytest.mark.parametrize(
    ("line", "lines"),
    [
        ("short", ["short"]),
        ("  words that go on and on and on", ["  words that go on", "  and on and on"]),
        ("  afs-l    1.5   22.5     3.5", ["  afs-l    1.5", "       22.5     3.5"]),
        ("  themis   9.5    1.5    13.5", ["  themis   9.5", "        1.5    13.5"]),
    ],
    ids=["what fits", "words", "a row of a table", "another, which goes on at the same place"],
)
def test_a_papers_lines_are_as_wide_as_there_is_room(line, lines):
    assert fitted(line, 20) == lines
    assert fitted(line, None) == [line]


def test_the_list_of_policies_fits_and_has_all_its_words(eighty, capsys):
    _, narrow, _ = shoal(capsys, "policy", "ls")
    _, wide, _ = shoal(capsys, "policy", "ls", "-o", "wide")
    assert max(map(len, narrow.splitlines())) <= 80
    assert sorted(narrow.split()) == sorted(wide.split())


def test_an_option_that_is_on_or_off_is_shown_as_it_is_written(capsys):
    _, out, _ = shoal(capsys, "policy", "show", "fifo")
    assert "backfill = yes" in out
