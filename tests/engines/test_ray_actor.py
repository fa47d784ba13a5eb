"""The actor that runs the agent on a node of Ray, without Ray."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from shoal.engines.ray_actor import AgentActor, Task


def ended(script: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """How the actor says that the agent has ended."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    argv = (sys.executable, "-S", "-c", script)
    actor = AgentActor(Task("abc1", "shoal-abc1-1", "gpu-1", "gpu-1", 1, argv, {}, {}, {}))
    end_s = time.monotonic() + 60
    while (said := actor.status()["ended"]) is None:
        assert time.monotonic() < end_s
        time.sleep(0.02)
    actor.stop()
    return str(said)


FAILS = """
import sys
print("1 worker", file=sys.stderr)
print("No module named shoal\\n\\n", file=sys.stderr)
sys.exit(3)
"""


def test_an_agent_that_fails_is_reported_with_its_last_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    said = ended(FAILS, monkeypatch, tmp_path)
    assert said == "the agent command ended: exit code 3: No module named shoal"
    assert "1 worker\n" in capfd.readouterr().err, "Ray's log of the actor has all of it"


LEAVES = """
import subprocess, sys
left = subprocess.Popen(["sleep", "60"], start_new_session=True)  # it keeps the standard error open
print(left.pid, "\x1b[31mred", "x" * 1000, file=sys.stderr)
sys.exit(1)
"""


def test_the_end_is_reported_also_while_somebody_else_may_still_print(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said = ended(LEAVES, monkeypatch, tmp_path)
    pid, _, words = said.removeprefix("the agent command ended: exit code 1: ").partition(" ")
    os.kill(int(pid), signal.SIGKILL)  # it was still there
    assert words.startswith("[31mred xxx")
    assert len(words) < 400
