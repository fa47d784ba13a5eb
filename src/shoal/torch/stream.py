"""One connection of the state port: sealed heads, and the bytes of tensors.

Between two addresses the connection runs inside TLS with the certificate of the job. On one address its bytes do not
leave the machine, and TLS would only slow it down. The connecting end decides: TLS begins with the byte 0x16, a plain
connection with `PLAIN`.

A head is a pickled dictionary with its length and a MAC, which is checked before the head is unpickled.
"""

from __future__ import annotations

import hmac
import pickle
import socket
import ssl
import time
from dataclasses import dataclass
from typing import Any

from shoal.torch.packing import dumps
from shoal.wire.auth import MAC_BYTES, AuthError, JobKey, Keys, Seal
from shoal.wire.channel import (
    HANDSHAKE_TIMEOUT_S,
    accept,
    parse_address,
    prove,
    receive_exactly,
    receive_into,
)
from shoal.wire.tls import JobTls, TlsStream

PURPOSE = "state"
CONNECT_TIMEOUT_S = 10.0
PLAIN, TLS_RECORD = b"\0", b"\x16"
MAX_HEAD_BYTES = 1 << 32
COPIED_BYTES = 1 << 18
"""Heads up to this size are copied, to be sent in one call."""


class Stream:
    def __init__(self, sock: socket.socket, key_out: bytes, key_in: bytes) -> None:
        self._sock = TlsStream(sock, None) if isinstance(sock, ssl.SSLSocket) else sock
        self._out, self._in = Seal(key_out), Seal(key_in)

    def send_head(self, head: dict[str, Any]) -> None:
        body = dumps(head)
        header = len(body).to_bytes(8, "big") + self._out.tag(body)
        if len(body) > COPIED_BYTES:
            self._sock.sendall(header)
            self._sock.sendall(body)
        else:
            self._sock.sendall(header + body)

    def receive_head(self, limit_bytes: int = MAX_HEAD_BYTES) -> dict[str, Any]:
        header = receive_exactly(self._sock, 8 + MAC_BYTES)
        size = int.from_bytes(header[:8], "big")
        if size > limit_bytes:
            raise ValueError("the description of the state is too long")
        body = receive_exactly(self._sock, size)
        if not hmac.compare_digest(header[8:], self._in.tag(body)):
            raise AuthError("a head of the state was altered, repeated or left out")
        head = pickle.loads(body)  # who made its MAC knows the job's secret
        if not isinstance(head, dict):
            raise ValueError("malformed description")
        return head

    def send(self, data: memoryview) -> None:
        self._sock.sendall(data)

    def receive_into(self, view: memoryview) -> None:
        receive_into(self._sock, view)

    def shutdown(self, how: int) -> None:
        self._sock.shutdown(how)

    def close(self) -> None:
        self._sock.close()


@dataclass(frozen=True, slots=True)
class Streams:
    """Opens and accepts the streams of one worker, which others reach at `host`."""

    job: str
    host: str
    secret: bytes
    tls: JobTls | None
    #: What it listens on, if not on `host`.
    bind: str = ""

    @property
    def own_address(self) -> str:
        """Where this machine reaches its own workers."""
        return self.bind or self.host

    @staticmethod
    def of(job: str, host: str, key: JobKey, bind: str = "") -> Streams:
        return Streams(job, host, key.secret, JobTls(key.pem) if key.pem else None, bind)

    def open(self, address: str, buffer_bytes: int) -> Stream:
        """Connect to a worker of the same job."""
        peer, port = parse_address(address)
        if peer != self.host and self.tls is None:
            raise AuthError(
                f"this worker is at {self.host} and {address} is another address: the job has no certificate, and "
                "its state is not sent over a network in plain text. Start the job again with this version of Shoal"
            )
        # A machine may not reach itself at an address that others know it by.
        where = self.own_address if peer == self.host else peer
        deadline_s = time.monotonic() + CONNECT_TIMEOUT_S
        sock = socket.create_connection((where, port), CONNECT_TIMEOUT_S)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
            if peer != self.host and self.tls is not None:
                sock = self.tls.client.wrap_socket(sock)
            else:
                sock.sendall(PLAIN)
            keys: Keys = prove(sock, self.secret, self.job, PURPOSE, deadline_s)
            sock.settimeout(None)
        except BaseException:
            sock.close()
            raise
        return Stream(sock, keys.client_to_server, keys.server_to_client)

    def accept(self, sock: socket.socket) -> Stream:
        """The other end of `open`, for an accepted socket. The caller closes the socket if this fails."""
        deadline_s = time.monotonic() + HANDSHAKE_TIMEOUT_S
        sock.settimeout(HANDSHAKE_TIMEOUT_S)
        if sock.recv(1, socket.MSG_PEEK) == TLS_RECORD and self.tls is not None:
            sock = self.tls.server.wrap_socket(sock, server_side=True)
        elif receive_exactly(sock, 1, deadline_s) != PLAIN:
            raise AuthError("malformed handshake")
        try:
            _, keys = accept(
                sock, lambda job, purpose: self.secret if (job, purpose) == (self.job, PURPOSE) else None
            )
        except BaseException:
            sock.close()  # `wrap_socket` took the accepted one over
            raise
        return Stream(sock, keys.server_to_client, keys.client_to_server)
