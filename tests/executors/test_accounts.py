"""Workers run under the accounts of their owners, cold and warm, and cannot read or change what is not theirs."""

from __future__ import annotations

import asyncio
import os
import pwd
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.executors.base import Exit, WorkerSpec
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
    env = {"SECRET_PATH": "", **more.pop("env", {})}
    return WorkerSpec(
        worker, directory / worker, "local", 0, command, more.pop("workdir", "/"), env, account=account,
        warm=warm, secret_files={"SHOAL_SECRET_FILE": f"secret of {worker}"}, **more,
    )  # fmt: skip


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
        zygote = Zygote() if warm else None
        executor = LocalExecutor(1, zygote=zygote)
        try:
            if zygote is not None and not await asyncio.to_thread(zygote.wait_ready, 120):
                pytest.skip("no warm starts here")
            mine, python = str(jobs_dir / "look.py"), sys.executable if warm else python_for_all()
            first, lines = await _run(executor, _spec(tmp_path, "1.0", ada, python, mine, warm=warm))
            assert first.ok, (first, lines)
            entry = pwd.getpwnam(ada)
            assert lines[0] == f"{entry.pw_uid} {entry.pw_gid} [{entry.pw_gid}] {entry.pw_dir} {ada}"
            assert lines[1] == "secret of 1.0"
            assert lines[-1] == "may not signal its keeper"
            (theirs,) = (jobs_dir / "jobs").glob("*.job")
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
        finally:
            executor.close()
            if zygote is not None:
                zygote.close()

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
