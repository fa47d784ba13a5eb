"""The standalone launcher and the examples, as a person would run them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from elastic_lab import run_script, until

from shoal.executors import zygote as zygote_module
from shoal.executors.keeper import start_time
from shoal.executors.standalone import LocalJob
from shoal.executors.zygote import Zygote
from shoal.torch import launch
from shoal.wire import events as ev
from shoal.wire.messages import Kind

EXAMPLES = Path(__file__).parents[2] / "examples" / "elastic"


def test_a_job_is_launched_resized_asked_and_stopped_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    where = str(tmp_path / "run")
    command = [sys.executable, "-m", "shoal.torch.launch", "--workers", "1", "--dir", where]
    script = [str(EXAMPLES / "emulated.py"), "--epochs", "500"]
    with open(tmp_path / "out", "wb") as out:
        process = subprocess.Popen(
            command + script, stdout=out, stderr=out, env={**os.environ, "PYTHONUNBUFFERED": "1"}
        )

    def asked() -> dict:
        code = launch.main(["--dir", where, "--status"])
        text = capsys.readouterr().out
        return json.loads(text.splitlines()[-1]) if code == 0 else {}

    try:
        until(lambda: asked().get("workers") == ["w0"], 90)
        assert launch.main(["--dir", where, "--resize", "2"]) == 0
        until(lambda: asked()["workers"] == ["w0", "w1"], 60)
        for pid in asked()["pids"].values():
            os.kill(pid, 0)  # there is such a process
        assert launch.main(["--dir", where, *script]) == 2
        assert f"a job runs in {where} already" in capsys.readouterr().err
        assert launch.main(["--dir", where, "--replace", "w7"]) == 1
        assert "there is no worker 'w7'; there are w0, w1" in capsys.readouterr().err
        until(lambda: asked()["total_steps"] == 500 * 40, 30)
        assert launch.main(["--dir", where, "--stop"]) == 0
        assert process.wait(30) == 1
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    text = (tmp_path / "out").read_text()
    assert "generation 1 (first): 1 worker after step 0" in text
    assert "generation 2 (switch): 2 workers" in text
    assert "failed: stopped by its user" in text
    assert "Traceback" not in text


def test_mistakes_on_the_command_line_are_answered_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    for argv, code, words in (
        ([], 2, "give a script"),
        (["--dir", str(tmp_path), "no.py"], 2, "there is no script no.py"),
        (["--dir", str(tmp_path), "--workers", "0", str(EXAMPLES / "emulated.py")], 2, "at least one worker"),
        (["--dir", str(tmp_path), "--from", "c.pt", str(EXAMPLES / "emulated.py")], 2, "no checkpoint c.pt"),
        (["--dir", str(tmp_path), "--status"], 1, "none has started there yet"),
        (
            ["--dir", "/dev/null/a", str(EXAMPLES / "emulated.py")],
            2,
            "cannot use --dir /dev/null/a: Not a dir",
        ),
    ):
        assert launch.main(argv) == code
        text = capsys.readouterr().err
        assert words in text
        assert text.count("\n") == 1


def test_a_job_that_lost_all_it_had_is_said_to_begin_again(capsys: pytest.CaptureFixture[str]):
    for kind, number, step in (
        (Kind.FIRST, 1, 0),
        (Kind.SWITCH, 2, 0),
        (Kind.FIRST, 3, 7),
        (Kind.FIRST, 4, 0),
    ):
        launch.print_event(ev.GenerationCommitted(number, ("w0",), step, kind))
    told = capsys.readouterr().out.splitlines()
    assert [line.endswith(", from the beginning") for line in told] == [False, False, False, True]


AFTER_TRAINING = """
import sys
import torch
import shoal.torch as shoal

job = shoal.init()
model = torch.nn.Linear(1, 1)
model, optimizer = job.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
loader = job.loader([torch.ones(1)] * 8, batch_size=4)
for _ in job.epochs(1):
    for x in loader:
        model(x).mean().backward()
        optimizer.step()
"""


@pytest.mark.parametrize(
    ("after", "told"),
    [
        ("open('/no/such/place/model.pt', 'wb')", "No such file or directory: '/no/such/place/model.pt'"),
        ("sys.exit(3)", "failed: its training was done, then w0 ended with code 3"),
        ("sys.exit(0)", None),
    ],
)
def test_a_job_fails_if_what_follows_its_training_fails(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], after: str, told: str | None
):
    script = tmp_path / "train.py"
    script.write_text(AFTER_TRAINING + after)
    code = launch.main(["--dir", str(tmp_path / "run"), str(script)])
    text = capfd.readouterr()
    assert "finished after 2 steps" in text.out
    assert code == (told is not None), text
    assert (told or "") in text.out + text.err


def test_what_a_user_sets_for_all_workers_reaches_warm_ones_too(
    tmp_path: Path, zygote: Zygote, monkeypatch: pytest.MonkeyPatch
):
    script = tmp_path / "script.py"
    script.write_text(
        "import os; open('told', 'w').write(os.environ['SHOAL_CHECKED']); import shoal.torch; shoal.torch.init()"
    )
    monkeypatch.setenv("SHOAL_CHECKED", "1")
    monkeypatch.chdir(tmp_path)
    with LocalJob([str(script)], 1, directory=tmp_path / "run", zygote=zygote):
        until(lambda: (tmp_path / "told").exists() and (tmp_path / "told").read_text() == "1")


def test_the_output_of_workers_is_shown_and_closing_ends_them(
    tmp_path: Path, zygote: Zygote, capsys: pytest.CaptureFixture[str]
):
    script = tmp_path / "script.py"
    script.write_text("import subprocess\nprint('hello', flush=True)\nsubprocess.run(['sleep', '1000'])\n")
    shown = ""
    with LocalJob([str(script)], 2, directory=tmp_path / "run", zygote=zygote, quiet=False) as job:

        def hellos() -> int:
            nonlocal shown
            shown += capsys.readouterr().out
            return shown.count("hello\n")

        until(lambda: hellos() == 2)
        pids = list(job.processes.pids.values())
        assert len(pids) == 2
        assert all(start_time(pid) is not None for pid in pids)
    assert all(start_time(pid) is None for pid in pids)


@pytest.mark.parametrize(
    ("script", "words"),
    [("digits.py", "epoch 0: 1 workers, accuracy 0."), ("characters.py", "epoch 0: 1 workers, loss"),
     ("emulated.py", "epoch 0: 1 workers,")],
)  # fmt: skip
def test_each_example_also_runs_as_a_plain_script(zygote: Zygote, tmp_path: Path, script: str, words: str):
    exit_, text = run_script(zygote, [str(EXAMPLES / script), "--epochs", "1"], {}, tmp_path)
    assert exit_.ok
    assert words in text


def test_a_warm_process_is_not_forked_where_that_is_not_safe(monkeypatch: pytest.MonkeyPatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert zygote_module.why_not_fork() == "CUDA is initialised"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert zygote_module.why_not_fork() == "torch may have started threads"
