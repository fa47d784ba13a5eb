"""Ports that an agent keeps free, so that a gang can meet on the node of its rank 0."""

from __future__ import annotations

import socket

STOCK = 8


class PortStock:
    """Each port is bound, and so nobody else gets it, until it is released for a worker."""

    def __init__(self) -> None:
        self._held: dict[int, socket.socket] = {}

    def fill(self) -> tuple[int, ...]:
        """All ports of the stock, after it was filled up."""
        while len(self._held) < STOCK:
            sock = socket.socket()
            try:
                sock.bind(("", 0))
            except OSError:  # none is free
                sock.close()
                break
            self._held[int(sock.getsockname()[1])] = sock
        return tuple(self._held)

    def release(self, port: int) -> tuple[int, ...]:
        """Release a port for a worker, and return the stock without it."""
        sock = self._held.pop(port, None)
        self.fill()  # before the port is free, so that it is not chosen again
        if sock is not None:
            sock.close()
        return tuple(self._held)

    def close(self) -> None:
        for sock in self._held.values():
            sock.close()
        self._held.clear()
