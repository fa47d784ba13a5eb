"""The demo leaves nothing behind, whatever happens to it."""

import signal
import subprocess
import sys

import psutil
import pytest
from live_cluster import ROOT, eventually


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_everything_the_demo_started_is_gone_when_it_is_ended(number, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    demo = subprocess.Popen(
        [sys.executable, str(ROOT / "examples" / "demo.py"), "--plain"], stdout=subprocess.PIPE, text=True
    )
    while "starting" not in (line := demo.stdout.readline()):
        assert line, "the demo ended by itself"
    (place,) = tmp_path.glob("shoal-demo-*")

    def of_the_demo():
        found = []
        for process in psutil.process_iter():
            try:
                found += [process] if any(str(place) in text for text in process.cmdline()) else []
            except psutil.Error:
                continue
        return found

    assert of_the_demo()
    demo.send_signal(number)
    demo.communicate()
    eventually(lambda: not of_the_demo() and not place.exists(), what="the end of all it started")
