"""The demo leaves nothing behind, whatever happens to it."""

import contextlib
import json
import signal
import subprocess
import sys

import psutil
import pytest
from live_cluster import ROOT, eventually


@pytest.mark.parametrize(
    ("number", "servers_die_too"),
    [(signal.SIGKILL, True), (signal.SIGINT, False)],
)
def test_everything_the_demo_started_is_gone_when_it_is_ended(number, servers_die_too, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    demo = subprocess.Popen(
        [sys.executable, str(ROOT / "examples" / "demo.py"), "--plain"],
        stdout=subprocess.PIPE,
        text=True,
    )
    while " running " not in (line := demo.stdout.readline()):
        assert line, "the demo ended by itself"
    (place,) = tmp_path.glob("shoal-demo-*")

    workers = []
    for path in place.glob("*/jobs/*/workers/*/started"):
        said = json.loads(path.read_text())
        for pid in (said["pid"], said["keeper_pid"]):
            with contextlib.suppress(psutil.NoSuchProcess):
                workers.append(psutil.Process(pid))
    assert workers

    def of_the_demo():
        found = [worker for worker in workers if worker.is_running()]
        for process in psutil.process_iter():
            try:
                found += [process] if any(str(place) in text for text in process.cmdline()) else []
            except psutil.Error:
                continue
        return found

    assert of_the_demo()
    if servers_die_too:
        for path in place.glob("*/server.json"):
            psutil.Process(json.loads(path.read_text())["pid"]).kill()
    demo.send_signal(number)
    demo.communicate()
    eventually(lambda: not of_the_demo() and not place.exists(), what="the end of all it started")
