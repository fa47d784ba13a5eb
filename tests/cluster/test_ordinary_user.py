"""Everything runs for an ordinary user who has a home and nothing else: no root, no rights beyond that."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import psutil
import pytest
from live_cluster import eventually

import shoal
from engines.absent import skip

NOBODY = 65534
SYSTEM = f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}"
"""Other users may run it where they may not enter the home of whoever installed this Python."""


class User:
    """Commands of a user with a home of its own. Whoever is no root is such a user."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.id = NOBODY if os.geteuid() == 0 else os.geteuid()
        self._as = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}
        if self._as:
            os.chown(home, NOBODY, NOBODY)
        self.executable = sys.executable
        outside = {k: v for k, v in os.environ.items() if not k.startswith(("SHOAL_", "XDG_"))}
        self.env = {**outside, "HOME": str(home), "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}

    def can_use(self, executable: str) -> bool:
        self.executable = executable
        with contextlib.suppress(OSError):
            return self.python("-c", "import shoal.server.serve").returncode == 0
        return False

    def start(self, *words: object, **options) -> subprocess.Popen:
        command = [self.executable, *map(str, words)]
        return subprocess.Popen(command, env=self.env, cwd=self.home, text=True, **self._as, **options)

    def python(self, *words: object) -> subprocess.CompletedProcess:
        process = self.start(*words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        out, err = process.communicate(timeout=180)
        return subprocess.CompletedProcess(words, process.returncode, out, err)

    def shoal(self, *words: object) -> str:
        done = self.python("-m", "shoal.cli.main", *words)
        assert done.returncode == 0, (words, done.stdout, done.stderr)
        return done.stdout

    def processes(self) -> list[psutil.Process]:
        return [p for p in psutil.process_iter() if self._is_ours(p)]

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            return process.uids().effective == self.id and process.environ().get("HOME") == str(self.home)
        except psutil.Error:
            return False

    def close(self) -> None:
        for process in self.processes():
            process.kill()
        shutil.rmtree(self.home, ignore_errors=True)


@pytest.fixture
def user():
    made = User(Path(tempfile.mkdtemp(prefix="shoal-user-", dir="/tmp")))  # a path that others may enter
    if not made.can_use(sys.executable):
        packages = [sysconfig.get_path("purelib"), str(Path(shoal.__file__).parents[1])]
        made.env["PYTHONPATH"] = os.pathsep.join(packages)
        if not made.can_use(SYSTEM):
            made.close()
            skip("NO TEST OF AN ORDINARY USER: other users may not read this Python and its packages")
    yield made
    made.close()


@pytest.mark.timeout(600)
def test_a_user_without_rights_brings_up_a_server_and_an_agent_runs_a_job_and_takes_all_down(user):
    user.shoal("up", "--gpus", 0, "--policy", "fifo", "--timeout", "120s")
    token = json.loads(user.shoal("node", "join-token", "create", "-o", "json"))
    (user.home / "token").write_text(token["token"])
    words = ("--join", token["address"], "--token-file", "token", "--name", "mine", "--gpus", 2)
    agent = user.start("-m", "shoal.cli.main", "agent", *words)
    nodes = lambda: json.loads(user.shoal("node", "ls", "-o", "json"))["items"]  # noqa: E731
    eventually(lambda: [n["state"] for n in nodes()] == ["ready"], 60, "the agent")
    user.shoal(
        "run", "-d", "--name", "t", "--gpus", 2, "--", "sh", "-c", "echo I am $(id -u) in $PWD; touch made"
    )
    user.shoal("wait", "t", "--timeout", "60s")
    assert f"I am {user.id} in {user.home}" in user.shoal("logs", "t")
    assert (user.home / "made").stat().st_uid == user.id
    assert (user.home / ".local" / "state" / "shoal-agent" / "mine").is_dir()
    doctor = json.loads(user.shoal("doctor", "-o", "json"))
    assert doctor["healthy"], doctor

    user.shoal("run", "-d", "--name", "long", "--gpus", 1, "--", "sleep", "1000")
    user.shoal("wait", "long", "--for", "running", "--timeout", "60s")
    user.shoal("down", "-y")
    agent.terminate()
    agent.wait(60)
    eventually(lambda: user.processes() == [], 60, "the end of all processes")
    assert {path.lstat().st_uid for path in user.home.rglob("*")} == {user.id} or os.geteuid() == 0
