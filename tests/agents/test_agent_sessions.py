"""Commands next to workers on another machine, over the connection of its agent."""

from __future__ import annotations

import asyncio
import pwd
from pathlib import Path

import pytest

from executors.two_accounts import open_directory, two_accounts
from shoal.agents.sessions import LOST, WINDOW_BYTES, AgentSessions, FleetSessions, RemoteSession
from shoal.executors.base import NamedAccount, OwnAccount
from shoal.executors.sessions import SessionError
from shoal.wire import agent_messages as am
from shoal.wire.messages import WireError

from .test_agents import Cluster, alive, run, state_of, until

HOLD = "while true; do sleep 0.05; done"


def opened(cluster: Cluster, *command: str, worker: str = "1.0", tty: bool = False) -> RemoteSession:
    return cluster.executor.sessions.open(worker, list(command), tty=tty, rows=24, columns=80)[1]


async def all_of(session: RemoteSession) -> str:
    found = b""
    async with asyncio.timeout(60):
        while session.exit_code is None or session.output:
            session.changed.clear()
            found += (data := session.take(len(found)))
            if not data and session.exit_code is None:
                await session.changed.wait()
    return found.decode()


async def first_line(session: RemoteSession) -> str:
    await until(lambda: b"\n" in session.output)
    return bytes(session.output).decode().strip()


def test_a_command_runs_next_to_a_worker_on_another_machine(tmp_path: Path) -> None:
    async def story(cluster: Cluster) -> None:
        cluster.agent("a", "127.0.0.2")
        await cluster.node("a")
        cluster.start("1.0", "a", HOLD, env={"LR": "0.1"}, workdir=str(tmp_path))
        session = opened(
            cluster, "sh", "-c", 'echo "$LR $SHOAL_HOST $PWD"; exit 3'
        )  # it waits for the worker
        assert await all_of(session) == f"0.1 127.0.0.2 {tmp_path}\n"
        assert session.exit_code == 3
        long = "".join(f"{n}\n" for n in range(1, 100_001))
        assert await all_of(opened(cluster, "seq", "1", "100000")) == long, "more than one window"
        terminal = opened(cluster, "sh", "-c", "read line; stty size; echo got $line", tty=True)
        terminal.resize(33, 101)
        terminal.write(b"keys\n")
        assert "33 101\r\ngot keys\r\n" in await all_of(terminal)
        missing = opened(cluster, "no-such-program")
        assert "shoal: cannot start 'no-such-program'" in await all_of(missing)
        assert missing.exit_code == 127
        with pytest.raises(SessionError, match="no connection"):
            opened(cluster, "true", worker="9.9")

    run(tmp_path, story)


def test_a_session_is_paused_with_its_worker_and_ends_with_the_connection(tmp_path: Path) -> None:
    async def story(cluster: Cluster) -> None:
        cluster.agent("a", "127.0.0.2")
        await cluster.node("a")
        cluster.start("1.0", "a", HOLD)
        session = opened(cluster, "sh", "-c", "setsid sleep 1000 & echo $!; wait")
        child = int(await first_line(session))
        cluster.executor.suspend("1.0")
        await until(lambda: state_of(child) == "T")
        cluster.executor.wake("1.0")
        await until(lambda: state_of(child) == "S")
        cluster.agents["a"].kill()  # the worker goes on
        await until(lambda: session.exit_code == LOST)
        cluster.agents["a"].wait()
        cluster.agent("a", "127.0.0.2")
        await until(lambda: cluster.executor._connected_agent_of("1.0") is not None)
        # The new agent knows how to run commands next to the worker of the old one.
        assert await all_of(opened(cluster, "echo", "again")) == "again\n"
        session = opened(cluster, "sh", "-c", "sleep 1000 & echo $!; wait")
        child = int(await first_line(session))
        cluster.executor.stop("1.0", kill=True)
        await until(lambda: "1.0" in cluster.exits)
        assert not alive(child)
        await until(lambda: session.exit_code == 137)

    run(tmp_path, story)


def test_an_agent_that_is_root_runs_workers_and_sessions_under_accounts_and_refuses_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(cluster: Cluster) -> None:
        cluster.agent("a", "127.0.0.2")
        await cluster.node("a")
        cluster.start(
            "1.0", "a", f'id -un; echo "job dir: $SHOAL_JOB_DIR"; {HOLD}', account=NamedAccount(ada)
        )
        said = await all_of(opened(cluster, "sh", "-c", "id -u; echo by name > /dev/stdout"))
        assert said == f"{pwd.getpwnam(ada).pw_uid}\nby name\n"
        # What is written on the disk of a node would be lost with it: there is no directory of the job.
        await until(lambda: cluster.lines("1.0") == [ada, "job dir: "])
        # The server does not say that the job may be root's: an agent that is root refuses it.
        cluster.start("2.0", "a", "true", account=OwnAccount(may_be_root=False))
        await until(lambda: "2.0" in cluster.exits)
        assert not cluster.exits["2.0"].began
        assert "here it would run as root" in cluster.exits["2.0"].why

    with two_accounts() as (ada, _), open_directory() as path:
        monkeypatch.setenv("SHOAL_JOBS_DIR", str(path / "jobs"))
        run(tmp_path, story)


def test_an_agent_that_sends_more_than_the_window_is_cut_off() -> None:
    async def story() -> None:
        sent: list[am.ToSession] = []
        fleet = FleetSessions(lambda worker: "a", lambda agent, message: sent.append(message))
        name, session = fleet.open("1.0", ["x"], tty=False, rows=1, columns=1)
        part = b"x" * am.SESSION_PART_BYTES
        for _ in range(WINDOW_BYTES // len(part)):
            fleet.received("a", am.SessionOutput(name, part))
        with pytest.raises(WireError):
            fleet.received("a", am.SessionOutput(name, part))
        assert len(session.take(10)) == WINDOW_BYTES - 10
        assert sent[-1] == am.SessionTaken(name, 10)
        fleet.received("b", am.SessionEnded(name, 0))
        assert session.exit_code is None, "a session is of one agent"
        fleet.close(name)
        assert sent[-1] == am.SessionClose(name)

    asyncio.run(story())


def test_an_agent_without_sessions_says_so() -> None:
    async def story() -> None:
        sent: list[am.SessionOutput | am.SessionEnded] = []
        agent = AgentSessions(None, sent.append)
        agent.received(am.SessionOpen("s", "1.0", ("x",), False, 1, 1))
        await until(lambda: sent)
        assert isinstance(sent[0], am.SessionEnded)
        assert (sent[0].code, sent[0].why) == (126, "this agent runs no commands next to workers")

    asyncio.run(story())
