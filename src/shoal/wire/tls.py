"""TLS: a blocking connection that one thread reads while others write, and the contexts of a job's own certificate.

The standard library's `SSLSocket` must not be used by two threads at once. Here the socket does not block: a lock
protects each call into OpenSSL, and the waiting happens outside the lock.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import select
import socket
import ssl
import threading


class JobTls:
    """The two ends of TLS between workers of one job, which all have the same certificate and key.

    The connecting end accepts this one certificate only.
    """

    def __init__(self, pem: bytes) -> None:
        self.server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self.client.check_hostname = False
        # OpenSSL reads keys from files only. This one is in memory.
        file = os.memfd_create("key", os.MFD_CLOEXEC)
        try:
            os.write(file, pem)
            self.server.load_cert_chain(f"/proc/self/fd/{file}")
            self.client.load_verify_locations(f"/proc/self/fd/{file}")
        finally:
            os.close(file)
        for context in (self.server, self.client):
            context.minimum_version = ssl.TLSVersion.TLSv1_3


class FingerprintError(OSError):
    """The server has another certificate than this end expects."""


def fingerprint(der: bytes) -> str:
    return hashlib.sha256(der).hexdigest()


def pinned_context() -> ssl.SSLContext:
    """Encrypts but accepts any certificate. Call `check_fingerprint` before anything is sent."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def check_fingerprint(connection: ssl.SSLObject | ssl.SSLSocket, expected: str) -> None:
    der = connection.getpeercert(binary_form=True)
    if der is None or not hmac.compare_digest(fingerprint(der), expected):
        raise FingerprintError(
            "the control plane's certificate is not the expected one: check the address, or create a new join token"
        )


class PinnedTls:
    """Connects to the one server whose certificate has this fingerprint."""

    def __init__(self, expected: str) -> None:
        self._expected, self._context = expected, pinned_context()

    def wrap_socket(self, sock: socket.socket, *, server_hostname: str) -> ssl.SSLSocket:
        wrapped = self._context.wrap_socket(sock, server_hostname=server_hostname)
        try:
            check_fingerprint(wrapped, self._expected)
        except BaseException:
            wrapped.close()
            raise
        return wrapped


class TlsStream:
    def __init__(self, sock: ssl.SSLSocket, send_timeout_s: float | None) -> None:
        """`send_timeout_s`: how long a peer that does not read may block the sender."""
        sock.setblocking(False)
        self._sock, self._send_timeout_s = sock, send_timeout_s
        self._lock = threading.Lock()

    def recv_into(self, view: memoryview) -> int:
        while True:
            try:
                with self._lock:
                    return self._sock.recv_into(view)
            except ssl.SSLWantReadError:
                self._wait(select.POLLIN, None)
            except ssl.SSLWantWriteError:
                self._wait(select.POLLOUT, None)

    def sendall(self, data: bytes | memoryview) -> None:
        rest = memoryview(data)
        while rest:
            try:
                with self._lock:
                    rest = rest[self._sock.send(rest) :]
            except ssl.SSLWantWriteError:
                self._wait(select.POLLOUT, self._send_timeout_s)
            except ssl.SSLWantReadError:
                self._wait(select.POLLIN, self._send_timeout_s)

    def _wait(self, events: int, timeout_s: float | None) -> None:
        poll = select.poll()
        poll.register(self._sock, events)
        if not poll.poll(None if timeout_s is None else timeout_s * 1e3):
            raise TimeoutError("the peer does not read")

    def shutdown(self, how: int) -> None:
        # That of SSLSocket would first end the encryption: another thread could then send in plain text.
        socket.socket.shutdown(self._sock, how)

    def close(self) -> None:
        self._sock.close()
