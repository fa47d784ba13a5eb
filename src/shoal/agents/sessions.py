"""Commands that people run next to workers, over the connection of the worker's agent.

A session is a bounded stream of bytes: the agent sends at most `WINDOW_BYTES` of output that the control plane's reader
has not taken, and then the command waits. A session ends with the connection: nobody could say what was lost.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from shoal.executors.sessions import Session, SessionError
from shoal.wire import agent_messages as am
from shoal.wire.messages import WireError

WINDOW_BYTES = 256 * 1024
MOST_EARLY = 16
LOST = 255
"""The exit code when nobody knows how the command ended."""

FromAgent = am.SessionOutput | am.SessionEnded


class OpenSession(Protocol):
    """Starts a command next to a worker of this machine. Raises SessionError."""

    def __call__(
        self, worker: str, command: list[str], *, tty: bool, rows: int, columns: int
    ) -> Coroutine[Any, Any, Session]: ...


class AgentSessions:
    """The agent's side."""

    def __init__(self, open_session: OpenSession | None, send: Callable[[FromAgent], None]) -> None:
        self._open_session, self._send = open_session, send
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._sessions: dict[str, Session] = {}
        #: What was said to sessions that have not begun.
        self._early: dict[str, list[am.ToSession]] = {}
        #: Bytes of output that the control plane's reader has taken, by session.
        self._taken: dict[str, int] = {}

    def received(self, message: am.ToSession) -> None:
        name = message.session
        if isinstance(message, am.SessionOpen):
            if name not in self._tasks:
                task = asyncio.get_running_loop().create_task(self._run(message))
                self._tasks[name] = task
                task.add_done_callback(lambda _: self._tasks.pop(name, None))
        elif isinstance(message, am.SessionClose):
            if name in self._tasks:
                self._tasks[name].cancel()
        elif (session := self._sessions.get(name)) is not None:
            self._tell(session, message)
        elif name in self._tasks and len(early := self._early.setdefault(name, [])) < MOST_EARLY:
            early.append(message)
        # else it has ended

    def _tell(self, session: Session, message: am.ToSession) -> None:
        if isinstance(message, am.SessionInput):
            session.write(message.data)
        elif isinstance(message, am.SessionSize):
            session.resize(message.rows, message.columns)
        elif isinstance(message, am.SessionTaken):
            self._taken[message.session] = max(self._taken[message.session], message.position)
            session.changed.set()

    def disconnected(self) -> None:
        """The connection is gone, and so is the reader."""
        for task in list(self._tasks.values()):
            task.cancel()

    async def _run(self, asked: am.SessionOpen) -> None:
        name = asked.session
        try:
            if self._open_session is None:
                raise SessionError("this agent runs no commands next to workers")
            session = await self._open_session(
                asked.worker, list(asked.command), tty=asked.tty, rows=asked.rows, columns=asked.columns
            )
        except SessionError as error:
            self._send(am.SessionEnded(name, 126, str(error)))
            return
        finally:
            early = self._early.pop(name, [])
        self._sessions[name], self._taken[name] = session, 0
        for message in early:
            self._tell(session, message)
        try:
            await self._pass_on(name, session)
            self._send(am.SessionEnded(name, session.exit_code or 0, session.why))
        finally:
            del self._sessions[name], self._taken[name]
            session.close()

    async def _pass_on(self, name: str, session: Session) -> None:
        """Send the output until the end of it."""
        sent = 0
        while not session.is_over:
            room = WINDOW_BYTES - (sent - self._taken[name])
            data = session.take(min(room, am.SESSION_PART_BYTES)) if room > 0 else b""
            if data:
                sent += len(data)
                self._send(am.SessionOutput(name, data))
                await asyncio.sleep(0)
            elif not session.is_over:
                session.changed.clear()
                await session.changed.wait()


class RemoteSession:
    """The control plane's side of one session. `output` begins at position `begin` of the whole output."""

    def __init__(self, agent: str, name: str, send: Callable[[str, am.ToSession], None]) -> None:
        self._agent, self._name, self._send = agent, name, send
        self.output, self.begin = bytearray(), 0
        self.exit_code: int | None = None
        self.changed = asyncio.Event()

    def take(self, after: int) -> bytes:
        """The output after this position. What comes before it is not needed again."""
        taken = min(max(after - self.begin, 0), len(self.output))
        if taken:
            del self.output[:taken]
            self.begin += taken
            self._send(self._agent, am.SessionTaken(self._name, self.begin))
        return bytes(self.output)

    def write(self, data: bytes) -> None:
        for begin in range(0, len(data), am.SESSION_PART_BYTES):
            self._send(self._agent, am.SessionInput(self._name, data[begin : begin + am.SESSION_PART_BYTES]))

    def resize(self, rows: int, columns: int) -> None:
        self._send(self._agent, am.SessionSize(self._name, rows, columns))

    def arrived(self, data: bytes) -> None:
        if len(self.output) + len(data) > WINDOW_BYTES:
            raise WireError("an agent sent more output of a session than it may")
        self.output += data
        self.changed.set()

    def ended(self, code: int, why: str) -> None:
        self.output += f"shoal: {why}\n".encode() if why else b""
        self.exit_code = code
        self.changed.set()


class FleetSessions:
    """The control plane's side. `send` queues a message for an agent, or drops it if there is no connection."""

    def __init__(
        self, agent_of: Callable[[str], str | None], send: Callable[[str, am.ToSession], None]
    ) -> None:
        """`agent_of`: the connected agent of a worker."""
        self._agent_of, self._send = agent_of, send
        self._sessions: dict[tuple[str, str], RemoteSession] = {}

    def open(
        self, worker: str, command: list[str], *, tty: bool, rows: int, columns: int
    ) -> tuple[str, RemoteSession]:
        """Start a command next to a worker: the session's name, and the session. Raises SessionError."""
        agent = self._agent_of(worker)
        if agent is None:
            raise SessionError(f"there is no connection to the machine of worker {worker} now")
        name = secrets.token_urlsafe(16)
        self._send(agent, am.SessionOpen(name, worker, tuple(command), tty, rows, columns))
        session = self._sessions[agent, name] = RemoteSession(agent, name, self._send)
        return name, session

    def close(self, name: str) -> None:
        for agent, each in list(self._sessions):
            if each == name:
                session = self._sessions.pop((agent, each))
                if session.exit_code is None:
                    self._send(agent, am.SessionClose(name))

    def received(self, agent: str, message: FromAgent) -> None:
        session = self._sessions.get((agent, message.session))
        if session is None or session.exit_code is not None:
            return  # it was closed here
        if isinstance(message, am.SessionOutput):
            session.arrived(message.data)
        else:
            session.ended(message.code, message.why)

    def disconnected(self, agent: str) -> None:
        for (of, _), session in self._sessions.items():
            if of == agent and session.exit_code is None:
                session.ended(LOST, "the connection to the machine broke")
