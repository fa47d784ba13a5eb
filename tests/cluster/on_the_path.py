"""Somebody on the path between machines. What he hears, repeats and guesses must be of no use to him."""

from __future__ import annotations

import os
import socket
import ssl
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress

import pytest
from live_cluster import eventually

from engines.absent import skip
from engines.shoal_home import ShoalHome
from shoal.agents.join_tokens import hash_secret
from shoal.agents.link import AGENT
from shoal.wire.auth import CHALLENGE_BYTES, AuthError, ClientProof
from shoal.wire.channel import _receive_short, _send_short, prove, receive_exactly

from .network import Listener

HANDSHAKE, RECORDS = 22, range(20, 24)
"""The types of TLS records: change of cipher, alert, handshake, and data."""


@contextmanager
def overheard(home: ShoalHome) -> Iterator[str]:
    """Somebody listens in the body, in which agents join and workers connect. It gets a value to give to jobs.

    Afterwards: all that was heard is TLS, no secret is in it, and no connection can be repeated.
    """
    value = "hunter2-" + os.urandom(8).hex()
    if os.geteuid() != 0:
        skip("NO TEST OF WHO LISTENS: only root can")
    listener = Listener(home.agents_port)
    try:
        yield value
    finally:
        listener.close()
    only_tls_was_heard(listener)
    nothing_was_given_away(listener, [value, "PASSWORD", *home.credentials().values()])
    recorded = list(listener.to_port())
    assert len(recorded) > len(home.credentials()), "agents and workers"
    nothing_can_be_repeated("127.0.0.1", home.agents_port, recorded)


def only_tls_was_heard(listener: Listener) -> None:
    """From its first byte to its last, in both directions, each connection is a row of TLS records."""
    assert len(listener.flows) >= 2
    for flow, data in listener.flows.items():
        position, kinds = 0, []
        while position + 5 <= len(data):
            kinds.append(data[position])
            assert kinds[-1] in RECORDS, (flow, position, bytes(data[position : position + 40]))
            assert data[position + 1] == 3, "the version, which TLS 1.3 writes as that of TLS 1.2"
            position += 5 + int.from_bytes(data[position + 3 : position + 5], "big")
        assert kinds[0] == HANDSHAKE, flow


def nothing_was_given_away(listener: Listener, secrets: Iterable[str]) -> None:
    heard = listener.everything()
    for secret in secrets:
        for shape in (secret, hash_secret(secret)):
            assert shape.encode() not in heard, "a secret is in the clear"


def nothing_can_be_repeated(host: str, port: int, recorded: Iterable[bytes]) -> None:
    """The bytes of each connection, sent once more, are no connection: TLS has other keys. The server hangs up."""
    for data in recorded:
        # It may hang up while it is still being told. A TimeoutError fails the test.
        with socket.create_connection((host, port), timeout=60) as sock, suppress(ConnectionError):
            sock.sendall(data)
            while sock.recv(1 << 16):
                pass


def only_its_secret_lets_an_agent_in(
    host: str, port: int, agent: str, credential: str, refusals: Callable[[], int]
) -> None:
    """The proof of an earlier handshake is none for the next challenge, and a wrong secret is refused. Both inside TLS.

    `refusals`: how many the server has recorded.
    """
    secret = bytes.fromhex(hash_secret(credential))
    with tls(host, port) as one:
        old = ClientProof.make(receive_exactly(one, CHALLENGE_BYTES), secret, agent, AGENT)
        _send_short(one, old.request)
        old.check(_receive_short(one))  # this one is right
    before = refusals()
    with tls(host, port) as two:
        receive_exactly(two, CHALLENGE_BYTES)
        _send_short(two, old.request)
        with pytest.raises(AuthError, match=r"^refused: "):
            old.check(_receive_short(two))
    with tls(host, port) as three, pytest.raises(AuthError, match=r"^refused: "):
        prove(three, b"\0" * 32, agent, AGENT, time.monotonic() + 60)
    eventually(lambda: refusals() >= before + 2, 60, "the refusals in the server's log")


def tls(host: str, port: int) -> ssl.SSLSocket:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context.wrap_socket(socket.create_connection((host, port), timeout=60))


def strangers_are_refused(home: ShoalHome) -> None:
    """At the port that the engine's agents have connected to, with the name of one of them."""
    agent, credential = next(iter(home.credentials().items()))
    run, states = home.agents(), {n.name: n.state for n in home.client.nodes()}

    def refusals() -> int:
        return (home.home / "server.log").read_text().count("refused a connection")

    only_its_secret_lets_an_agent_in("127.0.0.1", home.agents_port, agent, credential, refusals)
    assert home.agents() == run, "the agents are not disturbed"
    assert {n.name: n.state for n in home.client.nodes()} == states
