"""Commands that people run next to workers: they share the worker's account and variables, and its fate."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pwd
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from shoal.executors.base import Exit, NamedAccount, WorkerSpec
from shoal.executors.local import LocalExecutor
from shoal.executors.sessions import Session, SessionError

from .two_accounts import open_directory, two_accounts

HOLD = ("sh", "-c", "trap 'exit 0' TERM; while true; do sleep 0.05; done")


class Place:
    """A worker that holds its GPU, and its executor, which can be replaced."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.exits: list[Exit] = []
        self.sessions: list[Session] = []
        self.executor = self.new_executor()

    def new_executor(self) -> LocalExecutor:
        executor = LocalExecutor(1)
        executor.on_exit = self.exits.append
        return executor

    def start(self, *command: str, **more) -> None:
        given = {"workdir": "/", "env": {"LR": "0.1"}, "grace_s": 5.0, **more}
        spec = WorkerSpec(
            "1.0", self.directory / "1.0", "local", 0, command or HOLD, given.pop("workdir"), given.pop("env"), **given
        )  # fmt: skip
        self.executor.start(spec)

    async def session(self, *command: str, tty: bool = False) -> Session:
        made = await self.executor.session("1.0", list(command), tty=tty, rows=24, columns=80)
        self.sessions.append(made)
        return made

    async def result(self, *command: str) -> tuple[int | None, str]:
        """(exit code, output or why)."""
        session = await self.session(*command)
        output = await all_of(session)
        return session.exit_code, output or session.why

    async def adopt(self) -> None:
        """The process of the executor is replaced."""
        self.executor.close()
        self.executor = self.new_executor()
        self.executor.adopt("1.0", self.directory / "1.0")

    def close(self) -> None:
        for session in self.sessions:
            session.close()
        self.executor.stop("1.0", kill=True)


@contextlib.asynccontextmanager
async def place(tmp_path: Path) -> AsyncIterator[Place]:
    made = Place(tmp_path)
    try:
        yield made
    finally:
        made.close()
        await until(lambda: bool(made.exits))
        made.executor.close()


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():
            await asyncio.sleep(0.02)


async def all_of(session: Session) -> str:
    found = b""
    async with asyncio.timeout(60):
        while not session.is_over:
            data = session.take(1 << 20)
            found += data
            if not data and not session.is_over:
                session.changed.clear()
                await session.changed.wait()
    return found.decode()


async def first_line(session: Session) -> str:
    found = b""
    async with asyncio.timeout(60):
        while b"\n" not in found:
            session.changed.clear()
            found += session.take(1 << 20)
            if b"\n" not in found:
                await session.changed.wait()
    return found.decode().strip()


def run(story: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(story())  # type: ignore[arg-type]


def state_of(pid: int) -> str:
    """One letter: T is stopped. Empty: it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return stat[stat.rindex(")") + 2 :].split()[0].replace("Z", "")


def test_a_command_has_the_variables_of_the_worker_and_its_own_end(tmp_path: Path) -> None:
    async def story() -> None:
        async with place(tmp_path) as here:
            here.start()
            assert await here.result("sh", "-c", 'echo "$LR $SHOAL_DEVICE"; pwd; exit 3') == (
                3,
                "0.1 cpu\n/\n",
            )
            assert await here.result("sh", "-c", "kill -9 $$") == (137, "")
            assert (await here.result("no-such-program"))[0] == 127
            long = "".join(f"{n}\n" for n in range(1, 100_001))
            assert await here.result("seq", "1", "100000") == (0, long), "more than is kept at once"
            # What it leaves behind does not keep it from ending, and ends with the worker.
            code, left = await here.result("sh", "-c", "setsid sleep 1000 & echo $!; exit 4")
            assert code == 4
            assert not here.exits, "the worker goes on"
        assert state_of(int(left)) == ""

    run(story)


def test_a_terminal_takes_keys_and_a_size(tmp_path: Path) -> None:
    async def story() -> None:
        async with place(tmp_path) as here:
            here.start()
            session = await here.session(
                "sh", "-c", "read line; stty size; echo $line | wc -c; tty > /dev/tty", tty=True
            )
            session.resize(33, 101)
            session.write(b"x" * 2000 + b"\n")
            output = await all_of(session)
            assert "33 101\r\n2001\r\n/dev/pts/" in output

    run(story)


@pytest.mark.parametrize("escape", ["", "setsid "], ids=["child", "its own session"])
def test_a_session_is_suspended_and_continued_with_its_worker(tmp_path: Path, escape: str) -> None:
    """The GPUs of a suspended worker are given to another job."""

    async def story() -> None:
        async with place(tmp_path) as here:
            here.start()
            session = await here.session("sh", "-c", f"{escape}sleep 1000 & echo $!; wait")
            child = int(await first_line(session))
            here.executor.suspend("1.0")
            await until(lambda: state_of(child) == "T")
            code, why = await here.result("true")
            assert (code, why) == (126, "its job is paused")
            here.executor.wake("1.0")
            await until(lambda: state_of(child) == "S")
            assert (await here.result("true"))[0] == 0

    run(story)


@pytest.mark.parametrize("kill", [False, True])
def test_a_session_ends_with_its_worker(tmp_path: Path, kill: bool) -> None:
    async def story() -> None:
        async with place(tmp_path) as here:
            here.start()
            session = await here.session(
                "sh", "-c", "trap '' TERM HUP; setsid sleep 1000 & echo $!; wait; wait"
            )
            child = int(await first_line(session))
            here.executor.stop("1.0", kill=kill)
            await until(lambda: bool(here.exits))
            assert state_of(child) == ""
            await all_of(session)
            assert session.exit_code == 137
            with pytest.raises(SessionError):
                Session(tmp_path / "1.0", ["true"], tty=False, rows=1, columns=1)

    run(story)


def test_sessions_of_a_taken_over_worker(tmp_path: Path) -> None:
    """After a restart of the server, commands can be run next to its workers, and the old ones have ended."""

    async def story() -> None:
        async with place(tmp_path) as here:
            here.start()
            session = await here.session("sh", "-c", "sleep 1000 & echo $!; wait")
            child = int(await first_line(session))
            session.close()  # as when the process ends
            await until(lambda: state_of(child) == "")
            await here.adopt()
            assert await here.result("sh", "-c", "echo $LR") == (0, "0.1\n")

    run(story)


@pytest.fixture(scope="module")
def accounts() -> Iterator[tuple[str, str]]:
    with two_accounts() as names:
        yield names


@pytest.mark.parametrize("tty", [False, True], ids=["pipe", "terminal"])
def test_a_session_drops_privileges_like_its_worker(
    tmp_path: Path, accounts: tuple[str, str], monkeypatch: pytest.MonkeyPatch, tty: bool
) -> None:
    async def story() -> None:
        async with place(tmp_path) as here:
            here.start(account=NamedAccount(accounts[0]))
            script = (
                'id -u; id -Gn; echo $HOME; echo by name > /dev/stdout; ls "$0" 2>/dev/null || echo closed'
            )
            session = await here.session("sh", "-c", script, str(tmp_path), tty=tty)
            lines = (await all_of(session)).split("\r\n" if tty else "\n")
            entry = pwd.getpwnam(accounts[0])
            assert lines[0] == str(entry.pw_uid)
            assert f"{accounts[0]}-g" in lines[1]
            assert "root" not in lines[1]
            assert lines[2:5] == [entry.pw_dir, "by name", "closed"]

    with open_directory() as path:
        monkeypatch.setenv("SHOAL_JOBS_DIR", str(path / "jobs"))
        run(story)


def test_only_the_account_of_the_keeper_can_ask_it(
    tmp_path: Path, accounts: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory is closed. If somebody opened it, the keeper would still not run commands for them."""

    async def story(directory: Path) -> None:
        async with place(directory) as here:
            here.start()
            await here.result("true")
            (directory / "1.0").chmod(0o777)
            (directory / "1.0" / "sessions").chmod(0o777)
            pid = os.fork()
            if pid == 0:
                code = 9
                try:
                    os.setgid(pwd.getpwnam(accounts[0]).pw_gid)
                    os.setuid(pwd.getpwnam(accounts[0]).pw_uid)
                    code = _ask(directory / "1.0")
                finally:
                    os._exit(code)
            _, status = await asyncio.to_thread(os.waitpid, pid, 0)
            assert os.waitstatus_to_exitcode(status) == 5, "the connection was closed"

    with open_directory() as path:
        run(lambda: story(path))


def _ask(directory: Path) -> int:
    import socket

    signal.alarm(30)
    keeper = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    keeper.connect(str(directory / "sessions"))
    try:
        return 5 if keeper.recv(16) == b"" else 6
    except ConnectionError:
        return 5
