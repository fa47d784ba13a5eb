"""A server that runs as root, and two users with accounts of the machine."""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest


@pytest.fixture
def accounts():
    if os.geteuid() != 0 or shutil.which("useradd") is None:
        pytest.skip("needs root and useradd, to make accounts")
    names = [f"shoale{os.getpid()}{x}" for x in "ab"]
    try:
        for name in names:
            subprocess.run(["useradd", "-M", "-N", "-s", "/bin/sh", name], check=True, capture_output=True)
        yield names
    finally:
        for name in names:
            subprocess.run(["userdel", name], check=False, capture_output=True)


@pytest.fixture
def open_directory():
    path = Path(tempfile.mkdtemp(prefix="shoal-open-", dir="/tmp"))
    path.chmod(0o711)
    yield path
    shutil.rmtree(path, ignore_errors=True)


def test_jobs_of_two_users_run_under_their_accounts_and_cannot_read_each_other(
    cluster, accounts, open_directory, tmp_path
):
    cluster.up(gpus=2, env={"SHOAL_JOBS_DIR": str(open_directory / "jobs")})
    refused = cluster.shoal("user", "create", "eve", "--account", "no-such-account")
    assert refused.returncode == 7
    assert "there is no account 'no-such-account'" in refused.stderr
    for user, account in zip(("ada", "ben"), accounts):
        cluster.shoal("user", "create", user, "--account", account, code=0)
        (tmp_path / user).write_text(cluster.shoal("token", "create", "--user", user, code=0).stdout)

    def run_as(user, script, *options):
        env = {"SHOAL_TOKEN_FILE": str(tmp_path / user)}
        return cluster.shoal("run", *options, "--", "sh", "-c", script, env=env, cwd="/tmp")

    home = cluster.home
    first = run_as(
        "ada",
        'id -un; echo $HOME; echo mine > "$SHOAL_JOB_DIR/mine"; echo "$SHOAL_JOB_DIR"',
        "--secret",
        "K=v",
    )
    who, where, directory = first.stdout.splitlines()
    assert who == accounts[0]
    assert where == f"/home/{accounts[0]}"
    second = run_as(
        "ben", f"id -un; cat {directory}/mine {home}/admin.token {home}/jobs/1/secrets.json 2>&1; true"
    )
    lines = second.stdout.splitlines()
    assert lines[0] == accounts[1]
    assert len(lines) == 4
    assert all("Permission denied" in line for line in lines[1:]), lines
    assert (Path(directory) / "mine").read_text() == "mine\n"
    # A user without an account gets no job, and is told what to do.
    cluster.shoal("user", "create", "cay", code=0)
    (tmp_path / "cay").write_text(cluster.shoal("token", "create", "--user", "cay", code=0).stdout)
    third = run_as("cay", "true")
    assert third.returncode == 4
    assert "shoal user set cay --account NAME" in third.stderr
