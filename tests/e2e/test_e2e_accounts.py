"""A server that runs as root, and two users with accounts of the machine."""

import os
import pty
import select
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from live_cluster import SHOAL, Cluster, eventually

SCRIPT = Path(__file__).with_name("scripts") / "elastic.py"


@dataclass
class Lab:
    cluster: Cluster
    accounts: list[str]
    #: A directory that all accounts can enter.
    open: Path
    #: Only root can enter it.
    closed: Path

    def env(self, user):
        return {"SHOAL_TOKEN_FILE": str(self.closed / user)}

    def add_user(self, user, *options):
        self.cluster.shoal("user", "create", user, *options, code=0)
        (self.closed / user).write_text(self.cluster.shoal("token", "create", "--user", user, code=0).stdout)

    def shoal(self, user, *args, env=None, **more):
        return self.cluster.shoal(*args, env=self.env(user) | (env or {}), **{"cwd": "/tmp", **more})

    def sh(self, user, script, *options, **more):
        return self.shoal(user, "run", *options, "--", "sh", "-c", script, **more)


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    if os.geteuid() != 0 or shutil.which("useradd") is None:
        pytest.skip("needs root and useradd, to make accounts")
    names = [f"shoale{os.getpid()}{x}" for x in "ab"]
    closed = tmp_path_factory.mktemp("accounts")
    opened = Path(tempfile.mkdtemp(prefix="shoal-open-", dir="/tmp"))
    opened.chmod(0o711)
    cluster = Cluster(closed / "home")
    try:
        for name in names:
            subprocess.run(["useradd", "-M", "-N", "-s", "/bin/sh", name], check=True, capture_output=True)
        made = Lab(cluster, names, opened, closed)
        cluster.up(gpus=2, env={"SHOAL_JOBS_DIR": str(opened / "jobs")})
        for user, account in zip(("ada", "ben"), names):
            made.add_user(user, "--account", account)
        yield made
    finally:
        cluster.close()
        for name in names:
            subprocess.run(["userdel", name], check=False, capture_output=True)
        shutil.rmtree(opened, ignore_errors=True)


def test_jobs_of_two_users_run_under_their_accounts_and_cannot_read_each_other(lab):
    refused = lab.cluster.shoal("user", "create", "eve", "--account", "no-such-account")
    assert refused.returncode == 2
    assert "there is no account 'no-such-account'" in refused.stderr
    home = lab.cluster.home
    script = (
        'id -un; echo $HOME; echo mine > "$SHOAL_JOB_DIR/mine"; echo "$SHOAL_JOB_DIR"; echo err > /dev/stderr'
    )
    who, where, directory, error = lab.sh("ada", script, "--secret", "K=v").stdout.splitlines()
    assert (who, where, error) == (lab.accounts[0], f"/home/{lab.accounts[0]}", "err")
    second = lab.sh(
        "ben", f"id -un; cat {directory}/mine {home}/admin.token {home}/jobs/1/secrets.json 2>&1; true"
    )
    lines = second.stdout.splitlines()
    assert lines[0] == lab.accounts[1]
    assert len(lines) == 4
    assert all("Permission denied" in line for line in lines[1:]), lines
    assert (Path(directory) / "mine").read_text() == "mine\n"
    # A user without an account gets no job, and is told what to do.
    lab.add_user("cay")
    third = lab.sh("cay", "true")
    assert third.returncode == 4
    assert "shoal user set cay --account NAME" in third.stderr


def test_an_uploaded_directory_belongs_to_the_account(lab, tmp_path):
    (tmp_path / "data").write_text("uploaded")
    (tmp_path / "link").symlink_to("data")
    script = 'stat -c %U . data; cat link; echo; test "$PWD" = "$(pwd)" && echo same; echo new > made; pwd'
    done = lab.sh("ada", script, "--upload", cwd=tmp_path)
    owner, of_file, content, same, where = done.stdout.splitlines()
    assert (owner, of_file, content, same) == (lab.accounts[0], lab.accounts[0], "uploaded", "same")
    assert Path(where).is_relative_to(lab.open / "jobs")
    assert lab.sh("ben", f"cat {where}/data").returncode != 0


def test_commands_next_to_a_job_run_under_its_account_also_after_a_restart(lab):
    lab.shoal("ada", "run", "-d", "--name", "hold", "--", "sleep", "600", code=0)
    lab.shoal("ada", "wait", "hold", "--for", "running", "--timeout", "60s", code=0)
    script = f"id -un; echo by name > /dev/stdout; cat {lab.cluster.home}/admin.token"
    for restarted in (False, True):
        if restarted:
            lab.cluster.kill_server()
            lab.cluster.up(gpus=2, env={"SHOAL_JOBS_DIR": str(lab.open / "jobs")})
        done = lab.shoal("ada", "exec", "hold", "--", "sh", "-c", script)
        who, by_name, closed = done.stdout.splitlines()
        assert (who, by_name) == (lab.accounts[0], "by name")
        assert "Permission denied" in closed
    assert lab.shoal("ben", "exec", "hold", "--", "true").returncode == 3, "it is not there for others"
    lab.shoal("ada", "cancel", "hold", "-y", "--grace", "0s", code=0)


def test_an_interactive_job_has_a_terminal_of_its_account(lab):
    ours, theirs = pty.openpty()
    env = lab.cluster.env | lab.env("ada")
    started = subprocess.Popen(
        [*SHOAL, "run", "--interactive", "--name", "i1", "--", "sh", "-c", "id -un; tty > /dev/tty; stat -c %U $(tty)"],
        stdin=theirs, stdout=theirs, stderr=theirs, env=env, start_new_session=True, cwd="/tmp",
    )  # fmt: skip
    os.close(theirs)
    seen = b""
    try:
        while True:
            assert select.select([ours], [], [], 60.0)[0], seen
            try:
                data = os.read(ours, 65536)
            except OSError:  # the last process has closed it
                break
            seen += data
        assert started.wait(60) == 0, seen
    finally:
        started.kill()
        os.close(ours)
    account = lab.accounts[0].encode()
    assert account + b"\r\n/dev/pts/" in seen
    assert seen.count(account) == 2, "it owns its terminal, so that tmux and screen work"


def test_a_live_job_under_an_account_saves_its_state_and_goes_on_from_it(lab):
    """It reaches neither the home nor the Python of root: its state goes through the control plane."""
    shutil.copy(SCRIPT, lab.open)
    script = lab.open / SCRIPT.name
    script.chmod(0o644)
    python = _python_for(lab.accounts[0])
    shoal = Path(sys.modules["shoal"].__file__).parents[1]
    packages = [str(shoal), *(p for p in sys.path if p.endswith("site-packages"))]
    env = {"PYTHONPATH": os.pathsep.join(packages)}
    command = ("run", "-d", "--name", "live", "--gpus", "1..2", "--", python, script, "100000", "0.02")
    lab.shoal("ada", *command, env=env, code=0)

    def shown():
        return lab.cluster.json("show", "live")

    eventually(lambda: shown()["step"], 120, "the first step")
    assert lab.shoal("ada", "exec", "live", "--", "id", "-un", code=0).stdout.strip() == lab.accounts[0]
    lab.shoal("ada", "checkpoint", "live", code=0)
    eventually(lambda: shown()["checkpoint_at"], 60, "the checkpoint")
    lab.shoal("ada", "pause", "live", code=0)
    lab.shoal("ada", "wait", "live", "--for", "paused", "--timeout", "60s", code=0, timeout=90)
    step = shown()["step"]
    lab.shoal("ada", "resume", "live", code=0)
    after = eventually(lambda: (found := shown()["step"]) and found > step and found, 120, "more steps")
    assert after > step > 0
    lab.shoal("ada", "cancel", "live", "-y", "--grace", "0s", code=0)


def _python_for(account):
    """A Python of this version that the account may run."""
    for python in (sys.executable, f"/usr/bin/python3.{sys.version_info.minor}"):
        probe = [python, "-c", "import sys; print(sys.version_info[1])"]
        try:
            done = subprocess.run(probe, user=account, capture_output=True, text=True, cwd="/")
        except OSError:
            continue
        if done.stdout.strip() == str(sys.version_info.minor):
            return python
    pytest.skip("no Python of this version that other accounts may run")
