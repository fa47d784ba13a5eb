"""What users who share an account cannot read of each other: the server's files are hidden from their jobs."""

from __future__ import annotations

import asyncio
import json
import os
import pwd
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.executors import hidden
from shoal.executors.base import Exit, OwnAccount, WorkerSpec
from shoal.executors.local import LocalExecutor
from shoal.executors.logs import read_lines
from shoal.executors.zygote import Zygote

from .two_accounts import open_directory, python_for_all, two_accounts

TRY = """
import json, os, subprocess, sys
home, own, outside = sys.argv[1], sys.argv[2], sys.argv[3]
kept = f"{own}/workers/1.1"
def said(do):
    try:
        return do()
    except OSError as error:
        return error.strerror
token = f"{home}/admin.token"
read = lambda path: said(lambda: open(path).read())
nested = ["unshare", "-Urm", "sh", "-c", f"umount {home}; umount -l {home}; cat {token}"]
print(json.dumps({
    "uid": os.getuid(),
    "token": read(token),
    "own": read(f"{own}/mine"),
    "write": said(lambda: open(f"{own}/new", "w").write("new")),
    "its keeper's files": [read(f"{kept}/mark"), said(lambda: open(f"{kept}/exit", "w")),
                           said(lambda: os.unlink(f"{kept}/mark")), os.listdir(f"{own}/workers")],
    "another in their place": [said(lambda: os.rename(f"{own}/{name}", f"{own}/{name}-away"))
                               for name in ("workers", "workers/1.1")],
    "through a process outside": read(f"/proc/{outside}/root{token}"),
    "its variables": read(f"/proc/{outside}/environ"),
    "umount": subprocess.run(["umount", home], capture_output=True).returncode == 0,
    "in a namespace within": subprocess.run(nested, capture_output=True, text=True).stdout,
}))
"""


def _may_hide() -> None:
    if why := hidden.why_not():
        pytest.skip(f"no namespaces here: {why}")


@pytest.mark.parametrize("fork", [False, True], ids=["a new program", "a fork"])
def test_an_ordinary_account_can_hide_a_directory_and_the_job_cannot_undo_it(fork: bool) -> None:
    """Without root: this is what a server of an ordinary account can do against its own jobs."""
    _may_hide()
    with two_accounts() as (ada, _), open_directory() as path:
        home, own = path / "home", path / "home" / "jobs" / "1"
        own.mkdir(parents=True)
        (home / "admin.token").write_text("top secret")
        (own / "mine").write_text("mine")
        kept = own / "workers" / "1.1"
        kept.mkdir(parents=True)
        (own / "workers" / "1.0").mkdir()
        (kept / "mark").write_text("of the keeper")
        for each in (home, own.parent, own, *home.rglob("*")):
            os.chown(each, pwd.getpwnam(ada).pw_uid, -1)
        # The package may be in a directory that the account cannot read.
        source = Path(hidden.__file__).read_text().partition('if __name__ == "__main__"')[0]
        script = f"{source}\nhide({str(home)!r}, [{str(own)!r}], [{str(kept)!r}])\n"
        after = TRY if fork else f"os.execv(sys.executable, [sys.executable, '-c', {TRY!r}, *sys.argv[1:]])"
        outside = subprocess.Popen(["sleep", "600"], user=ada, env={"TOKEN": "top secret"}, cwd="/")
        try:
            command = [python_for_all(), "-c", script + after, str(home), str(own), str(outside.pid)]
            done = subprocess.run(command, user=ada, group=pwd.getpwnam(ada).pw_gid, extra_groups=[],
                                  capture_output=True, text=True, cwd="/")  # fmt: skip
        finally:
            outside.kill()
            outside.wait()
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout) == {
            "uid": pwd.getpwnam(ada).pw_uid,
            "token": "No such file or directory",
            "own": "mine",
            "write": 3,
            "its keeper's files": ["of the keeper", *["Read-only file system"] * 2, ["1.1"]],
            "another in their place": ["Device or resource busy"] * 2,
            "through a process outside": "Permission denied",
            "its variables": "Permission denied",
            "umount": False,
            "in a namespace within": "",
        }
        assert (own / "new").read_text() == "new"
        assert sorted(os.listdir(own / "workers")) == ["1.0", "1.1"]


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
def test_workers_that_share_an_account_do_not_see_the_files_of_the_executor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm: bool
) -> None:
    _may_hide()
    monkeypatch.setattr(os, "geteuid", lambda: 1000)  # the executor of a server that is not root
    home = tmp_path / "home"
    real, workdir = home / "jobs" / "1" / "workers" / "1.0", home / "workdirs" / "1"
    for path in (real, workdir, home / "agent" / "workers"):
        path.mkdir(parents=True)
    directory = home / "agent" / "workers" / "1.0"
    directory.symlink_to(real)
    (home / "admin.token").write_text("top secret")
    (workdir / "look.py").write_text(
        "import os\n"
        f"print(os.path.exists({str(home / 'admin.token')!r}), os.getcwd())\n"
        "print(open(os.environ['SHOAL_SECRET_FILE']).read(), sorted(os.listdir(os.environ['SHOAL_JOB_DIR'])))\n"
        "while not os.path.exists('done'): pass\n"
    )

    async def story() -> None:
        zygote = Zygote() if warm else None
        executor = LocalExecutor(1, zygote=zygote, own_files=home)
        ended: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()
        executor.on_exit = ended.set_result
        try:
            if zygote is not None:
                assert await asyncio.to_thread(zygote.wait_ready, 120)
            executor.start(
                WorkerSpec(
                    "1.0", directory, "local", 0, (sys.executable, "look.py"), str(workdir),
                    {"SHOAL_JOB_DIR": str(home / "jobs" / "1")}, warm=warm,
                    secret_files={"SHOAL_SECRET_FILE": "the key"}, account=OwnAccount(shared=True), tree="uploaded",
                )
            )  # fmt: skip
            command = ["sh", "-c", f"cat {home}/admin.token; touch done"]
            session = await executor.session("1.0", command, tty=False, rows=1, columns=1)
            exit_ = await asyncio.wait_for(ended, 120)
            lines = [line.text for line in read_lines(real, 0)]
            assert (exit_.code, lines) == (0, [f"False {workdir}", "the key ['workers']"])
            assert b"No such file" in session.take(1000), "a command next to it sees no more"
            session.close()
        finally:
            executor.close()
            if zygote is not None:
                zygote.close()

    asyncio.run(story())


def test_a_working_directory_that_a_user_names_is_not_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _may_hide()
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    other = tmp_path / "home" / "jobs" / "2"
    other.mkdir(parents=True)
    (other / "checkpoint.pt").write_text("of another")

    async def story() -> None:
        executor = LocalExecutor(1, own_files=tmp_path / "home")
        ended: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()
        executor.on_exit = ended.set_result
        directory = tmp_path / "home" / "jobs" / "1" / "workers" / "1.0"
        command = ("cat", str(other / "checkpoint.pt"))
        executor.start(
            WorkerSpec("1.0", directory, "local", 0, command, str(other), {}, account=OwnAccount(shared=True))
        )
        exit_ = await asyncio.wait_for(ended, 120)
        assert exit_.code == 126, read_lines(directory, 0)
        assert "may not start in this directory" in exit_.why
        executor.close()

    asyncio.run(story())


def test_only_what_is_inside_is_given_back_also_through_links(tmp_path: Path) -> None:
    home, alias = tmp_path / "home", tmp_path / "alias"
    (home / "real").mkdir(parents=True)
    (home / "agent").mkdir()
    (home / "agent" / "1.0").symlink_to(home / "real")
    alias.symlink_to(home)
    needed = [str(home / "agent" / "1.0"), str(alias / "real"), "/tmp", str(home / "none")]
    assert hidden.plan(alias, needed) == {
        "hidden": str(home),
        "given_back": [str(home / "agent" / "1.0"), str(home / "real")],
        "read_only": [],
    }
    found = hidden.plan(home, needed, [str(home / "real")])
    assert (found["given_back"], found["read_only"]) == ([str(home / "agent" / "1.0")], [str(home / "real")])
