"""How agents join, are refused, are removed and join again, over TLS and without processes of their own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from shoal import __version__
from shoal.agents.agent import AgentError
from shoal.agents.certificate import fingerprint_of, make_certificate, server_context
from shoal.agents.fleet import AgentExecutor
from shoal.agents.join_tokens import JoinToken
from shoal.agents.joining import Membership
from shoal.agents.link import Link, StreamLink
from shoal.agents.main import _token
from shoal.agents.registry import AgentRegistry
from shoal.wire import agent_messages as am
from shoal.wire.auth import AuthError
from shoal.wire.listener import Connection, Listener


class World:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        make_certificate(directory / "cert", directory / "key")
        self.fingerprint = fingerprint_of(directory / "cert")
        self.tls = server_context(directory / "cert", directory / "key")
        self.registry = AgentRegistry(directory / "agents.json")
        self.executor = AgentExecutor(self.registry)
        self.address = ""

    def token(self, lifetime_s: float = 3600.0) -> JoinToken:
        return self.registry.create_token(self.fingerprint, time.time(), lifetime_s)

    def member(self, name: str, token: JoinToken) -> Membership:
        state = self.directory / name
        state.mkdir(exist_ok=True)
        file = self.directory / f"{name}.token"
        file.write_text(str(token))
        return Membership(state, name, self.address, token, file)

    async def join(self, name: str, token: JoinToken) -> Membership:
        """Join, and go away again."""
        member = self.member(name, token)
        link = await member.connect()
        answer = await hello(link, name)
        assert isinstance(answer, am.Welcome)
        member.save(answer.credential)
        link.close()
        return member

    @property
    def refused(self) -> list[tuple[str, str, str]]:
        return [(r.agent, r.address, r.why) for r in self.executor.refusals.recent(time.time())]


async def hello(link: Link, name: str, **fields: object) -> am.AgentMessage:
    node = am.NodeFacts(name, 1, "virtual", True)
    said = am.AgentHello(name, f"run of {link.credential}", (node,), 0.0, 0.0, credential=link.credential)
    link.send(msgspec.structs.replace(said, **fields))
    return await link.receive()


@asynccontextmanager
async def world(directory: Path) -> AsyncIterator[World]:
    made = World(directory)
    made.address = await made.executor.listen("127.0.0.1", 0, made.tls)
    try:
        yield made
    finally:
        made.executor.close()


def run(directory: Path, story: Callable[[World], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(60), world(directory) as made:
            await story(made)

    asyncio.run(limited())


def test_an_agent_that_was_removed_joins_again_with_a_new_token(tmp_path: Path) -> None:
    async def story(here: World) -> None:
        old = here.token()
        member = await here.join("a", old)
        here.executor.forget("a")
        with pytest.raises(AuthError, match=r"removed with `shoal node rm`.*join-token create") as found:
            await member.connect()  # the token that it joined with serves no longer, either
        assert str(tmp_path / "a.token") in str(found.value)
        assert ("a", "127.0.0.1") in [(agent, address) for agent, address, _ in here.refused]
        new = here.token()
        (tmp_path / "a.token").write_text(str(new))
        link = await member.connect()  # while it runs
        assert link.credential == new.secret
        answer = await hello(link, "a")
        assert isinstance(answer, am.Welcome)
        member.save(answer.credential)
        assert here.refused == []
        here.executor.forget("a")
        again = here.member("a", here.token())  # started again with a new token and the old state
        assert isinstance(await hello(await again.connect(), "a"), am.Welcome)

    run(tmp_path, story)


def test_an_agent_that_is_known_does_not_use_a_token(tmp_path: Path) -> None:
    async def story(here: World) -> None:
        await here.join("a", here.token())
        unused = here.token()
        link = await here.member("a", unused).connect()
        assert link.credential != unused.secret
        assert isinstance(await hello(link, "a"), am.Welcome)
        assert [t.used_by for t in here.registry.tokens.values()] == ["a", None]

    run(tmp_path, story)


def test_an_agent_that_is_removed_between_its_handshake_and_its_hello_is_refused(tmp_path: Path) -> None:
    async def story(here: World) -> None:
        member = await here.join("a", here.token())
        link = await member.connect()
        here.executor.forget("a")
        answer = await hello(link, "a")
        assert isinstance(answer, am.Refused)
        assert "removed" in answer.why
        assert not answer.final, "it connects again, and is told what to do"

    run(tmp_path, story)


@pytest.mark.parametrize(
    "case", ["wrong token", "expired", "used", "duplicate", "other protocol", "no secret"]
)
def test_whoever_is_refused_is_known_with_address_and_reason(tmp_path: Path, case: str) -> None:
    async def story(here: World) -> None:
        if case == "wrong token":
            with pytest.raises(AgentError, match="join-token create"):
                await here.member("b", JoinToken(here.fingerprint, "0" * 48)).connect()
            expected = ("", "join token is not known")
        elif case == "expired":
            await hello(await here.member("b", here.token(-1.0)).connect(), "b")
            expected = ("b", "has expired")
        elif case == "used":
            token = here.token()
            await here.join("a", token)
            await hello(await here.member("b", token).connect(), "b")
            expected = ("b", "was used by the agent a")
        elif case == "duplicate":
            first = await here.member("a", here.token()).connect()
            assert isinstance(await hello(first, "a"), am.Welcome)
            other = await Membership(tmp_path / "other", "a", here.address, here.token()).connect()
            await hello(other, "a")
            first.close()
            expected = ("a", "another agent named a is connected")
        elif case == "other protocol":
            link = await here.member("b", here.token()).connect()
            answer = await hello(link, "b", protocol=1, versions={"shoal": "0.0.1"})
            assert isinstance(answer, am.Refused)
            assert answer.final
            expected = ("b", f"runs Shoal 0.0.1 (protocol 1), the server {__version__}")
            assert f"install version {__version__}" in answer.why
        else:
            await here.join("a", here.token())
            (tmp_path / "a" / "credential").write_text("0" * 48)
            with pytest.raises(AuthError):
                await here.member("a", JoinToken(here.fingerprint, "0" * 48)).connect()
            expected = ("a", "is not known, or was removed")
        found = [r for r in here.refused if r[0] == expected[0]]
        ((_, address, why),) = found
        assert address == "127.0.0.1"
        assert expected[1] in why

    run(tmp_path, story)


@pytest.mark.parametrize("known", [True, False])
def test_an_agent_of_another_wire_protocol_is_told_the_servers_version_and_the_server_notes_it(
    tmp_path: Path, known: bool
) -> None:
    async def story(here: World) -> None:
        token = here.token()
        if known:
            await here.join("a", token)

        async def serve(made: Connection) -> None:
            link = StreamLink(
                made.reader, made.writer, made.keys.client_to_server, made.keys.server_to_client
            )
            await here.executor.serve(link, made.request.purpose, made.request.job)

        later = Listener(here.executor.secret_of, serve, here.executor.handshake_failed)
        _, port = await later.listen("127.0.0.1", 0, here.tls, protocol=999)
        here.address = f"127.0.0.1:{port}"
        with pytest.raises(AgentError) as found:
            await here.member("a", token).connect()
        assert f"999 (Shoal {__version__})" in str(found.value)
        assert "`shoal node ls`" in str(found.value)
        ((agent, address, why),) = here.refused
        assert (agent, address) == ("a" if known else "", "127.0.0.1")
        assert f"install version {__version__}" in why
        await later.close()

    run(tmp_path, story)


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"SSH-2.0-OpenSSH_9.6\r\n"])
def test_an_agent_that_dials_the_port_of_the_api_is_told_which_port_to_use(
    tmp_path: Path, answer: bytes
) -> None:
    async def story(here: World) -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(1)
            writer.write(answer)
            writer.close()

        async with await asyncio.start_server(serve, "127.0.0.1", 0) as api:
            here.address = f"127.0.0.1:{api.sockets[0].getsockname()[1]}"
            with pytest.raises((AgentError, OSError)) as found:
                await here.member("a", here.token()).connect()
        is_http = answer.startswith(b"HTTP")
        assert isinstance(found.value, AgentError if is_http else OSError), "what is no API may be back soon"
        assert (f"{here.address} speaks HTTP" in str(found.value)) is is_http
        assert ("`shoal node add HOST`" in str(found.value)) is is_http

    run(tmp_path, story)


@pytest.mark.parametrize(
    ("recorded", "is_kept"), [("the same", True), ("", True), ("of another control plane", False)]
)
def test_an_agent_that_was_killed_as_it_wrote_keeps_its_credential(
    tmp_path: Path, recorded: str, is_kept: bool
) -> None:
    """Without it, it would count as another agent of the same name, and wait until its own workers' lease has ended."""
    token = JoinToken("f" * 64, "0" * 48)
    (tmp_path / "token").write_text(str(token))
    (tmp_path / "credential").write_text("its own")
    (tmp_path / "fingerprint").write_text(token.fingerprint if recorded == "the same" else recorded)
    assert _token(tmp_path / "token", tmp_path) == token
    assert (tmp_path / "credential").exists() is is_kept
    assert (tmp_path / "fingerprint").read_text() == token.fingerprint


def test_what_a_stranger_says_of_itself_cannot_change_a_terminal(tmp_path: Path) -> None:
    async def story(here: World) -> None:
        (tmp_path / "evil").mkdir()
        (tmp_path / "evil" / "credential").write_text("0" * 48)
        token = JoinToken(here.fingerprint, "")
        with pytest.raises(AuthError):
            await Membership(tmp_path / "evil", "\x1b[2J" + "x" * 500, here.address, token).connect()
        ((agent, _, _),) = here.refused
        assert agent == "?[2J" + "x" * 60

    run(tmp_path, story)
