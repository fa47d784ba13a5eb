"""A blocking TLS connection that one thread reads while others write.

The standard library's `SSLSocket` must not be used by two threads at once. Here the socket does not block: a lock
protects each call into OpenSSL, and the waiting happens outside the lock.
"""

from __future__ import annotations

import select
import ssl
import threading
import time


class TlsStream:
    def __init__(self, sock: ssl.SSLSocket, send_timeout_s: float) -> None:
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

    def sendall(self, data: bytes) -> None:
        deadline_s = time.monotonic() + self._send_timeout_s
        rest = memoryview(data)
        while rest:
            try:
                with self._lock:
                    rest = rest[self._sock.send(rest) :]
            except ssl.SSLWantWriteError:
                self._wait(select.POLLOUT, deadline_s)
            except ssl.SSLWantReadError:
                self._wait(select.POLLIN, deadline_s)

    def _wait(self, events: int, deadline_s: float | None) -> None:
        poll = select.poll()
        poll.register(self._sock, events)
        left_ms = None if deadline_s is None else max(0.0, deadline_s - time.monotonic()) * 1e3
        if not poll.poll(left_ms):
            raise TimeoutError("the peer does not read")

    def shutdown(self, how: int) -> None:
        self._sock.shutdown(how)

    def close(self) -> None:
        self._sock.close()
