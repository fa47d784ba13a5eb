"""Process groups of a generation, formed in the background through the job's control channel.

Members exchange their addresses as entries on a board that the coordinator distributes. The channel is authenticated
and exists anyway: no extra port is opened, the rendezvous does not depend on any worker, and the control plane is
needed only while a group forms.
"""

from __future__ import annotations

import base64
import hmac
import socket
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

import torch
from shoal.torch.gloo_listener import Device

FORM_TIMEOUT_S = 30.0
#: How long members have to prove to each other who they are.
PROOF_S = 10.0
# The coordinator or a closed connection ends a collective, never its own timeout.
COLLECTIVE_TIMEOUT = timedelta(days=30)


class Cancelled(Exception):
    """The plan was dropped while its group formed."""


class BoardStore(dist.Store):  # type: ignore[misc]  # torch is not type-checked
    """A store that publishes its keys to the board of one plan, and is filled from it."""

    def __init__(self, publish: Callable[[str, str], None]) -> None:
        super().__init__()
        self._publish = publish
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._cancelled = False

    def fill(self, entries: dict[str, str]) -> None:
        with self._changed:
            for key, value in entries.items():
                self._values.setdefault(key, base64.b64decode(value))
            self._changed.notify_all()

    def cancel(self) -> None:
        with self._changed:
            self._cancelled = True
            self._changed.notify_all()

    def set(self, key: str, value: bytes) -> None:
        with self._changed:
            self._values[key] = bytes(value)
        self._publish(key, base64.b64encode(bytes(value)).decode())

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        limit_s = min(timeout.total_seconds(), FORM_TIMEOUT_S) if timeout else FORM_TIMEOUT_S
        with self._changed:
            present = self._changed.wait_for(
                lambda: self._cancelled or all(k in self._values for k in keys), limit_s
            )
            if self._cancelled:
                raise Cancelled("the plan was dropped")
            if not present:
                raise TimeoutError("the other members did not publish their addresses")

    def check(self, keys: list[str]) -> bool:
        with self._changed:
            return all(k in self._values for k in keys)

    def has_extended_api(self) -> bool:
        return False


def gather(store: dist.Store, members: Sequence[str], worker: str) -> None:
    """Wait until all members are about to form a group: nobody listens before."""
    store.set(f"here {worker}", b"1")
    store.wait([f"here {member}" for member in members], timedelta(seconds=FORM_TIMEOUT_S))


def form_gloo(
    store: dist.Store, members: Sequence[str], worker: str, host: str, secret: bytes, label: str
) -> Any:
    """A gloo group of these members, which have proved to each other that they know the job's secret.

    It listens on `host` only, and only until all members are connected. `label` names the group: no two groups of a job
    have the same.
    """
    options, device = dist.ProcessGroupGloo._Options(), Device(host)
    options._devices = [device.device]
    options._timeout = timedelta(seconds=FORM_TIMEOUT_S)
    options._threads = 2
    group = dist.ProcessGroupGloo(store, members.index(worker), len(members), options)
    _prove(group, members, worker, secret, label)
    device.stop_listening()
    group._set_default_timeout(COLLECTIVE_TIMEOUT)
    return group


def _prove(group: Any, members: Sequence[str], worker: str, secret: bytes, label: str) -> None:
    """Make sure that each connection leads to the member that it should lead to.

    Gloo takes whoever sends the right small number for a member. Such a group would fail, or wait forever, in its first
    step; here it fails at once, and the next one is formed.
    """
    limit = timedelta(seconds=PROOF_S)
    proofs = {m: hmac.digest(secret, f"gloo {label} {m}".encode(), "sha256") for m in members}
    others = [rank for rank, member in enumerate(members) if member != worker]
    own = torch.tensor(list(proofs[worker]), dtype=torch.uint8)
    sent = [group.send([own], rank, 0) for rank in others]
    for rank in others:
        theirs = torch.zeros_like(own)
        group.recv([theirs], rank, 0).wait(limit)
        if not hmac.compare_digest(bytes(theirs.tolist()), proofs[members[rank]]):
            raise ConnectionError(f"a stranger took the place of {members[rank]}")
    for work in sent:
        work.wait(limit)


def form_nccl(gloo: Any, members: Sequence[str], worker: str, host: str, bind: str) -> Any:
    """The nccl group beside a gloo group, for models on GPUs. Not covered by our tests."""
    rank, size = members.index(worker), len(members)
    address = torch.zeros(64, dtype=torch.uint8)
    store = None
    if rank == 0:
        store = listening_store(host, size, bind)
        text = f"{host}:{store.port}".encode()
        address[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)
    gloo.broadcast([address]).wait()
    if store is None:
        where, _, port = bytes(address.tolist()).rstrip(b"\0").decode().rpartition(":")
        store = dist.TCPStore(where, int(port), size, is_master=False)
    group = dist.ProcessGroupNCCL(store, rank, size)
    group._shoal_store = store  # it must live as long as the group
    return group


def listening_store(host: str, size: int, bind: str = "") -> Any:
    """A store that listens on `bind`, or on `host`, only. A TCPStore by itself listens on all addresses."""
    server = socket.create_server((bind or host, 0))
    port = server.getsockname()[1]
    return dist.TCPStore(
        host, port, size, is_master=True, wait_for_workers=False, master_listen_fd=server.detach()
    )
