"""A gloo device that listens only while its group forms.

Gloo has no call for it: a device listens for as long as it lives, and keeps every connection that anybody makes. So
once all members are connected, the listening socket is exchanged, under its number, for a file that is never ready.
Gloo's event loop watches that file instead, and gloo closes it with the device.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

_making = threading.Lock()


class Device:
    """A gloo device on `host`. `stop_listening` when the group is formed."""

    def __init__(self, host: str) -> None:
        with _making:  # so that a new socket belongs to this device
            before = set(_listening(host))
            self.device: Any = dist.ProcessGroupGloo.create_device(hostname=host)
            self._sockets = [number for number in _listening(host) if number not in before]

    def stop_listening(self) -> None:
        sockets, self._sockets = self._sockets, []
        for number in sockets:
            loops = _loops_that_watch(number)
            if len(loops) == 1:  # otherwise this gloo is not as we know it, and goes on listening
                _exchange(number, loops[0])


def _listening(host: str) -> Iterator[int]:
    """Numbers of the files of this process that are sockets which listen on `host`."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as sock:
                is_tcp = sock.family in (socket.AF_INET, socket.AF_INET6)
                listens = is_tcp and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                if listens and sock.getsockname()[0] == host:
                    yield int(name)


def _loops_that_watch(number: int) -> list[int]:
    """Numbers of the epoll files of this process that watch this file."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}") == "anon_inode:[eventpoll]":
                with open(f"/proc/self/fdinfo/{name}") as file:
                    watched = [line.split()[1] for line in file if line.startswith("tfd:")]
                if str(number) in watched:
                    found.append(int(name))
    return found


def _exchange(number: int, loop: int) -> None:
    epoll = select.epoll.fromfd(os.dup(loop))  # closing it leaves the loop itself alone
    never_ready = os.eventfd(0, os.EFD_CLOEXEC)
    try:
        epoll.unregister(number)
        os.dup2(never_ready, number, inheritable=False)  # closes the socket
        epoll.register(number, select.EPOLLIN)
    finally:
        os.close(never_ready)
        epoll.close()
