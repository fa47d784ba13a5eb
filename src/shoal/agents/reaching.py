"""Whether machines can connect to each other, as workers of one job do.

An agent that tells others a wrong address works in all other respects: it is the agent that connects to the control
plane. So on request each agent listens for a short while where its workers listen, and tries to connect to a few of the
others at the addresses that they tell. Each listener says a random text, so that another program is not taken for it.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from shoal.wire import agent_messages as am

OTHERS = 3
"""How many others an agent tries: the work for all agents grows with their number only."""
LISTEN_S = 30.0
CONNECT_S = 5.0
ANSWER_S = 3.0
"""How long the control plane waits for an answer to a simple question."""


class Greeter:
    """The agent's side."""

    def __init__(self, host: str, send: Callable[[am.FromAgent], None]) -> None:
        """`host`: where workers listen."""
        self._host, self._send = host, send
        self._server: asyncio.Server | None = None

    async def received(self, message: am.Listen | am.Reach) -> None:
        if isinstance(message, am.Listen):
            self._send(await self._listen(message.text.encode()))
            return
        tries = [_try_to_reach(address, text) for address, text in message.others.items()]
        why = dict(zip(message.others, await asyncio.gather(*tries)))
        self._send(am.Reached({address: words for address, words in why.items() if words}))

    async def _listen(self, text: bytes) -> am.Listening:
        def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(text)
            writer.close()

        self.close()
        try:
            server = self._server = await asyncio.start_server(greet, self._host, 0)
        except OSError as error:
            return am.Listening(0, f"{self._host}: {_words(error)}")
        asyncio.get_running_loop().call_later(LISTEN_S, server.close)
        return am.Listening(int(server.sockets[0].getsockname()[1]))

    def close(self) -> None:
        if self._server is not None:
            self._server.close()


async def _try_to_reach(address: str, text: str) -> str:
    """Why it is not possible. Empty: it is."""
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(CONNECT_S):
            reader, writer = await asyncio.open_connection(host, int(port))
            try:
                found = await reader.read(len(text))
            finally:
                writer.close()
    except TimeoutError:
        return "no answer"
    except (OSError, ValueError) as error:
        return _words(error) if isinstance(error, OSError) else str(error)
    return "" if found == text.encode() else "another program answers there"


def _words(error: OSError) -> str:
    """asyncio replaces the reason by the address, and leaves the number."""
    number = error.errno or 0
    return (os.strerror(number) if number > 0 else str(error)).lower()


@dataclass(slots=True)
class Reach:
    """What is known of the way to one agent."""

    #: What it tells others.
    address: str
    #: Why its workers cannot listen.
    deaf: str = ""
    #: The agents that cannot connect to it, and why.
    cut_off: dict[str, str] = field(default_factory=dict)


Answer = am.Listening | am.Reached


class Reaching:
    """The control plane's side."""

    def __init__(self) -> None:
        self._found: dict[str, Reach] = {}
        self._awaited: dict[str, asyncio.Future[Answer]] = {}
        self._task: asyncio.Task[None] | None = None

    def known(self, agents: Iterable[str]) -> dict[str, Reach]:
        """What the last try showed, of these agents."""
        return {name: self._found[name] for name in agents if name in self._found}

    def forget(self, agent: str) -> None:
        """It connects anew, maybe with another address."""
        self._found.pop(agent, None)
        for found in self._found.values():
            found.cut_off.pop(agent, None)

    def answered(self, agent: str, answer: Answer) -> None:
        awaited = self._awaited.get(agent)
        if awaited is not None and not awaited.done():
            awaited.set_result(answer)

    async def try_all(self, addresses: Mapping[str, str], send: Callable[[str, am.ToAgent], None]) -> None:
        """Let these agents try to connect to each other. Two that ask at one time get the same answer."""
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._try_all(dict(addresses), send))
        await asyncio.shield(self._task)

    async def _try_all(self, addresses: Mapping[str, str], send: Callable[[str, am.ToAgent], None]) -> None:
        if len(addresses) < 2:
            self._found = {}
            return
        texts = {agent: secrets.token_hex(16) for agent in addresses}
        listening = await self._ask({agent: am.Listen(text) for agent, text in texts.items()}, send, ANSWER_S)
        found = {agent: Reach(addresses[agent]) for agent in listening}
        at: dict[str, str] = {}
        for agent, answer in listening.items():
            if isinstance(answer, am.Listening) and answer.port:
                at[agent] = f"{addresses[agent]}:{answer.port}"
            elif isinstance(answer, am.Listening):
                found[agent].deaf = answer.why
        tries = {agent: am.Reach({at[o]: texts[o] for o in _others(agent, at)}) for agent in listening}
        agent_at = {address: agent for agent, address in at.items()}
        for agent, reached in (await self._ask(tries, send, CONNECT_S + ANSWER_S)).items():
            for address, why in reached.failed.items() if isinstance(reached, am.Reached) else ():
                if address in agent_at:
                    found[agent_at[address]].cut_off[agent] = why
        self._found = found

    async def _ask(
        self,
        questions: Mapping[str, am.Listen | am.Reach],
        send: Callable[[str, am.ToAgent], None],
        limit_s: float,
    ) -> dict[str, Answer]:
        """The answers of those that answer in time."""
        loop = asyncio.get_running_loop()
        self._awaited = {agent: loop.create_future() for agent in questions}
        for agent, question in questions.items():
            send(agent, question)
        if not questions:
            return {}
        await asyncio.wait(self._awaited.values(), timeout=limit_s)
        return {agent: future.result() for agent, future in self._awaited.items() if future.done()}


def _others(agent: str, agents: Iterable[str]) -> list[str]:
    """The next few agents in a ring of all."""
    after = sorted(agents, key=lambda other: (other <= agent, other))
    return [other for other in after if other != agent][:OTHERS]
