"""Join tokens, credentials and certificates: who may join, and what a refused agent is told."""

from __future__ import annotations

import asyncio
import stat
from pathlib import Path

import pytest

from shoal.agents.agent import AgentError
from shoal.agents.certificate import fingerprint_of, make_certificate, server_context
from shoal.agents.fleet import AgentExecutor
from shoal.agents.join_tokens import JoinToken, TokenError, check_token, new_token
from shoal.agents.joining import Membership
from shoal.agents.registry import AgentRegistry
from shoal.wire import agent_messages as am
from shoal.wire.messages import WireError
from shoal.wire.tls import FingerprintError

FINGERPRINT = "ab" * 32


def test_a_token_is_parsed_as_it_was_written() -> None:
    token, stored = new_token(FINGERPRINT, 100.0, 60.0)
    assert JoinToken.parse(f" {token}\n") == token
    assert token.secret not in repr(token)
    assert token.secret not in repr(stored)


@pytest.mark.parametrize("text", ["", "shoal-join", "shoal-join:ab:cd", f"x:{FINGERPRINT}:{'0' * 48}"])
def test_what_is_not_a_token_is_refused_with_the_command_that_makes_one(text: str) -> None:
    with pytest.raises(TokenError, match="join-token create"):
        JoinToken.parse(text)


def test_wrong_expired_and_used_tokens_are_refused() -> None:
    token, stored = new_token(FINGERPRINT, 100.0, 60.0)
    check_token(stored, token.secret, "a", 159.0)
    with pytest.raises(TokenError, match="expired"):
        check_token(stored, token.secret, "a", 160.0)
    with pytest.raises(TokenError, match="not known"):
        check_token(stored, "0" * 48, "a", 101.0)
    with pytest.raises(TokenError, match="not known"):
        check_token(None, token.secret, "a", 101.0)


def test_a_used_token_serves_only_the_agent_that_used_it(tmp_path: Path) -> None:
    registry = AgentRegistry(tmp_path / "agents.json")
    token = registry.create_token(FINGERPRINT, 100.0, 60.0)
    (name,) = registry.tokens
    registry.use_token(name, "a")
    again = AgentRegistry(tmp_path / "agents.json")
    again.check_token(name, token.secret, "a", 101.0)
    with pytest.raises(TokenError, match="used by the agent a"):
        again.check_token(name, token.secret, "b", 101.0)
    assert token.secret not in (tmp_path / "agents.json").read_text()
    assert stat.S_IMODE((tmp_path / "agents.json").stat().st_mode) == 0o600
    assert again.remove_token(name)
    with pytest.raises(TokenError, match="not known"):
        again.check_token(name, token.secret, "a", 101.0)


def test_an_agent_talks_only_to_the_certificate_in_its_token(tmp_path: Path) -> None:
    async def story() -> None:
        make_certificate(tmp_path / "cert", tmp_path / "key")
        assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600
        registry = AgentRegistry(tmp_path / "agents.json")
        executor = AgentExecutor(registry)
        address = await executor.listen("127.0.0.1", 0, server_context(tmp_path / "cert", tmp_path / "key"))
        (tmp_path / "state").mkdir()

        def member(token: JoinToken) -> Membership:
            return Membership(tmp_path / "state", "a", address, token)

        try:
            good = registry.create_token(fingerprint_of(tmp_path / "cert"), 0.0, 1e12)
            with pytest.raises(FingerprintError, match="certificate"):
                await member(JoinToken(FINGERPRINT, good.secret)).connect()
            with pytest.raises(AgentError, match="does not know this join token"):
                await member(JoinToken(good.fingerprint, "0" * 48)).connect()
            # The stored hash passes the handshake, but the secret itself is needed too.
            link = await member(good).connect()
            link.send(am.AgentHello("a", "run", (), 0.0, 0.0, credential="0" * 48))
            refused = await link.receive()
            assert isinstance(refused, am.Refused)
            assert refused.final
            expired = registry.create_token(good.fingerprint, 0.0, 1.0)
            link = await member(expired).connect()
            link.send(am.AgentHello("a", "run", (), 0.0, 0.0, credential=expired.secret))
            refused = await link.receive()
            assert isinstance(refused, am.Refused)
            assert "expired" in refused.why
        finally:
            executor.close()

    asyncio.run(story())


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        b"\x80",
        am.encode(am.Ack(1))[:-1],
        am.encode(am.Ack(1)) + b"\x00",
        b"\x82\xa4type\xa3Ack\xa4done\xa11",  # text for a number
        b"\x83\xa4type\xa3Ack\xa4done\x01\xa1x\x01",  # an unknown field
        b"\x81\xa4type\xa4Nope",
        *(am.encode(am.Command(1, am.Forget(name))) for name in ("../x", "a/b", "", ".", "1.0\n")),
    ],
)
def test_malformed_messages_are_refused(body: bytes) -> None:
    with pytest.raises(WireError):
        am.decode(body)
