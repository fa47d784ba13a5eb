"""Workers run under the accounts of their owners, cold and warm, and cannot read or change what is not theirs."""

from __future__ import annotations

import asyncio
import contextlib
import grp
import os
import pwd
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from shoal.executors.accounts import job_directories
from shoal.executors.base import Exit, NamedAccount, OwnAccount, WorkerSpec
from shoal.executors.local import LocalExecutor
from shoal.executors.logs import read_lines
from shoal.executors.zygote import Zygote

from .two_accounts import open_directory, python_for_all, two_accounts


@pytest.fixture(scope="module")
def accounts() -> Iterator[tuple[str, str]]:
    with two_accounts() as names:
        yield names


@pytest.fixture
def jobs_dir(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with open_directory() as path:
        monkeypatch.setenv("SHOAL_JOBS_DIR", str(path / "jobs"))
        yield path


async def _run(executor: LocalExecutor, spec: WorkerSpec) -> tuple[Exit, list[str]]:
    ended: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()
    executor.on_exit = ended.set_result
    executor.start(spec)
    exit_ = await asyncio.wait_for(ended, 120)
    return exit_, [line.text for line in read_lines(spec.directory, 0)]


def _spec(
    directory: Path, worker: str, account: str, *command: str, warm: bool = False, **more
) -> WorkerSpec:
    env = {"SHOAL_JOB_DIR": "the one in the home", **more.pop("env", {})}
    return WorkerSpec(
        worker, directory / worker, "local", 0, command, more.pop("workdir", "/"), env,
        account=NamedAccount(account), warm=warm,
        secret_files={"SHOAL_SECRET_FILE": f"secret of {worker}"}, **more,
    )  # fmt: skip


@contextlib.asynccontextmanager
async def _executor(*, warm: bool = False) -> AsyncIterator[LocalExecutor]:
    zygote = Zygote() if warm else None
    executor = LocalExecutor(1, zygote=zygote)
    try:
        if zygote is not None:
            assert await asyncio.to_thread(zygote.wait_ready, 120)
        yield executor
    finally:
        executor.close()
        if zygote is not None:
            zygote.close()


LOOK = """
import os, sys
print(os.getuid(), os.getgid(), sorted(os.getgroups()), os.environ["HOME"], os.environ["USER"])
print(open(os.environ["SHOAL_SECRET_FILE"]).read())
open(os.path.join(os.environ["SHOAL_JOB_DIR"], "mine"), "w").write("mine")
for path in sys.argv[1:]:
    for mode in ("r", "w"):
        try:
            open(path, mode)
            print("opened", path, mode)
        except OSError as error:
            print(error.strerror)
try:
    os.kill(os.getppid(), 9)
    print("killed the keeper")
except PermissionError:
    print("may not signal its keeper")
"""


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
def test_a_worker_runs_as_its_owner_and_reaches_only_what_is_its_own(
    tmp_path: Path, accounts: tuple[str, str], jobs_dir: Path, warm: bool
) -> None:
    ada, ben = accounts
    (jobs_dir / "look.py").write_text(LOOK)
    (jobs_dir / "look.py").chmod(0o644)
    admin_token = tmp_path / "admin.token"
    admin_token.write_text("top secret")

    async def story() -> None:
        async with _executor(warm=warm) as executor:
            mine, python = str(jobs_dir / "look.py"), sys.executable if warm else python_for_all()
            first, lines = await _run(executor, _spec(tmp_path, "1.0", ada, python, mine, warm=warm))
            assert first.ok, (first, lines)
            entry = pwd.getpwnam(ada)
            groups = sorted({entry.pw_gid, grp.getgrnam(f"{ada}-g").gr_gid})
            assert lines[0] == f"{entry.pw_uid} {entry.pw_gid} {groups} {entry.pw_dir} {ada}"
            assert lines[1] == "secret of 1.0"
            assert lines[-1] == "may not signal its keeper"
            (theirs,) = (jobs_dir / "jobs").glob("jobs-*/1")
            assert theirs.stat().st_uid == entry.pw_uid
            assert theirs.stat().st_mode & 0o777 == 0o700
            assert not list((jobs_dir / "jobs").glob("*.secrets")), "removed when the worker has ended"
            # The other one finds everything closed: the first one's directory, the home, the keeper's files.
            files = [theirs / "mine", admin_token, tmp_path / "1.0" / "exit", tmp_path / "1.0" / "log.0"]
            command = (python, mine, *map(str, files))
            second, lines = await _run(executor, _spec(tmp_path, "2.0", ben, *command, warm=warm))
            assert second.ok
            assert lines[2:-1] == ["Permission denied"] * 2 * len(files)
            assert (theirs / "mine").read_text() == "mine"

    asyncio.run(story())


def test_an_account_that_does_not_exist_or_a_closed_directory_is_a_clear_end(
    tmp_path: Path, accounts: tuple[str, str], jobs_dir: Path
) -> None:
    async def story() -> None:
        executor = LocalExecutor(1)
        exit_, _ = await _run(executor, _spec(tmp_path, "1.0", "no-such-account", "true"))
        assert (exit_.began, exit_.why) == (
            False, "cannot start it: there is no account 'no-such-account' on this machine",
        )  # fmt: skip
        closed = tmp_path / "closed"
        closed.mkdir(mode=0o700)
        exit_, _ = await _run(executor, _spec(tmp_path, "1.1", accounts[0], "true", workdir=str(closed)))
        assert exit_.code == 126
        assert "its account may not start in this directory" in exit_.why
        executor.close()

    asyncio.run(story())


def test_a_link_that_a_job_lays_never_leads_root_elsewhere(
    tmp_path: Path, accounts: tuple[str, str], jobs_dir: Path
) -> None:
    """The owner of a job may do what it wants in the job's directory; a later start must not follow it."""

    async def story() -> None:
        executor = LocalExecutor(1)
        script = 'rm -rf "$SHOAL_JOB_DIR"/*; ln -s /etc "$SHOAL_JOB_DIR/secrets"; ls -d "$SHOAL_JOB_DIR"'
        exit_, lines = await _run(executor, _spec(tmp_path, "1.0", accounts[0], "sh", "-c", script))
        assert exit_.ok, lines
        before = sorted(os.listdir("/etc"))
        exit_, _ = await _run(executor, _spec(tmp_path, "1.1", accounts[0], "sh", "-c", "true"))
        assert exit_.ok
        assert sorted(os.listdir("/etc")) == before
        exit_, _ = await _run(executor, _spec(tmp_path, "1.2", accounts[1], "true"))
        assert "belongs to another account" in exit_.why, "a job never changes its account"
        executor.close()

    asyncio.run(story())


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
def test_the_output_can_be_opened_by_name_and_only_the_accounts_files_are_looked_at(
    tmp_path: Path, accounts: tuple[str, str], jobs_dir: Path, warm: bool
) -> None:
    script = jobs_dir / "say.py"
    script.write_text(
        "for name in ('out', 'err'):\n    print(name, file=open(f'/dev/std{name}', 'w'), flush=True)"
    )
    script.chmod(0o644)
    hidden = tmp_path / "hidden.py"  # below a directory that only root can enter
    hidden.write_text("")
    python = sys.executable if warm else python_for_all()

    async def story() -> None:
        async with _executor(warm=warm) as executor:
            exit_, lines = await _run(
                executor, _spec(tmp_path, "1.0", accounts[0], python, str(script), warm=warm)
            )
            assert (exit_.code, lines) == (0, ["out", "err"])
            # What root could find does not show: a file that exists and one that does not give the same answer.
            answers = []
            for number, path in enumerate((hidden, hidden.with_name("none.py"))):
                spec = _spec(tmp_path, f"2.{number}", accounts[0], python, str(path), warm=warm)
                exit_, lines = await _run(executor, spec)
                answers.append((exit_.code, exit_.why, [line.replace(path.name, "") for line in lines]))
            for number, directory in enumerate((tmp_path, tmp_path / "none")):
                command = (python, str(script))
                spec = _spec(
                    tmp_path, f"3.{number}", accounts[0], *command, warm=warm, workdir=str(directory)
                )
                exit_, lines = await _run(executor, spec)
                said = [line.replace(str(directory), "") for line in lines]
                answers.append((exit_.code, exit_.why.replace(str(directory), ""), said))
            if not warm:  # there Python itself looks for the file, and says that it may not
                answers[0] = answers[1]
            assert answers[0] == answers[1]
            assert answers[2] == answers[3]
            assert answers[3][0] == 126

    asyncio.run(story())


def test_an_uploaded_directory_is_used_as_it_is_and_never_read_by_root(
    tmp_path: Path, accounts: tuple[str, str], jobs_dir: Path
) -> None:
    """It belongs to the account: while root copies it, its owner could replace files by links to root's."""
    tree = jobs_dir / "tree"
    tree.mkdir()
    os.chown(tree, pwd.getpwnam(accounts[0]).pw_uid, -1)

    async def story() -> None:
        async with _executor() as executor:
            command = ("sh", "-c", "pwd; echo done > result")
            exit_, lines = await _run(
                executor, _spec(tmp_path, "1.0", accounts[0], *command, workdir=str(tree), tree="digest")
            )
            assert (exit_.code, lines) == (0, [str(tree)])
        assert (tree / "result").read_text() == "done\n"

    asyncio.run(story())


def test_a_worker_under_an_account_sees_that_it_may_go(
    tmp_path: Path, accounts: tuple[str, str], jobs_dir: Path
) -> None:
    async def story() -> None:
        async with _executor() as executor:
            waits = 'while [ ! -e "$SHOAL_GO" ]; do sleep 0.02; done; echo "$SHOAL_GO"'
            spec = _spec(tmp_path, "1.0", accounts[0], "sh", "-c", waits, waits_for_go=True)
            running = asyncio.create_task(_run(executor, spec))
            while not (spec.directory / "started").exists():
                await asyncio.sleep(0.02)
            executor.go("1.0")
            exit_, (path,) = await running
            assert exit_.ok
            assert not os.path.exists(path), "removed when the worker has ended"

    asyncio.run(story())


def test_a_job_without_an_account_does_not_become_root(tmp_path: Path, jobs_dir: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root")

    async def story() -> None:
        spec = WorkerSpec("1.0", tmp_path / "1.0", "local", 0, ("true",), "/", {}, account=OwnAccount())
        async with _executor() as executor:
            exit_, _ = await _run(executor, spec)
            assert not exit_.began
            assert "here it would run as root" in exit_.why
            assert "shoal user set USER --account NAME" in exit_.why
        allowed = LocalExecutor(1, allow_root=True)
        exit_, _ = await _run(allowed, replace(spec, directory=tmp_path / "again"))
        assert exit_.ok
        allowed.close()

    asyncio.run(story())


def test_each_server_finds_the_directories_of_its_own_jobs(
    tmp_path: Path, accounts: tuple[str, str], jobs_dir: Path
) -> None:
    async def story() -> None:
        async with _executor() as executor:
            for worker in ("1.0", "1.1", "2.0"):
                command = ("sh", "-c", 'echo > "$SHOAL_JOB_DIR/file"')
                exit_, _ = await _run(executor, _spec(tmp_path, worker, accounts[0], *command))
                assert exit_.ok
        assert [path.name for path in job_directories(tmp_path)] == ["1", "2"]
        assert job_directories(tmp_path / "of another server") == []

    asyncio.run(story())
