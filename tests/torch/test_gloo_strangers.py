"""Strangers who connect while a gloo group forms, and after it."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import psutil
import pytest
import torch.distributed as dist

import torch
from shoal.torch import group as group_module
from shoal.torch.gloo_listener import Device
from shoal.torch.group import form_gloo, gather

MEMBERS = ("w0", "w1", "w2")
SECRET = b"the job's secret"


def ports(host: str) -> list[int]:
    """Where this process listens on `host`."""
    found = psutil.Process().net_connections("tcp")
    return [c.laddr.port for c in found if c.status == psutil.CONN_LISTEN and c.laddr.ip == host]


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(len(MEMBERS)) as made:
        yield made


def form(
    pool: ThreadPoolExecutor, host: str, secrets: dict[str, bytes] | None = None
) -> list[Future[object]]:
    store = dist.HashStore()

    def one(worker: str) -> object:
        gather(store, MEMBERS, worker)
        return form_gloo(store, MEMBERS, worker, host, (secrets or {}).get(worker, SECRET), "7 vote")

    return [pool.submit(one, worker) for worker in MEMBERS]


def test_a_group_listens_no_longer_than_it_forms(pool: ThreadPoolExecutor) -> None:
    groups = [future.result(60) for future in form(pool, "127.0.0.8")]
    assert ports("127.0.0.8") == []
    tensors = [torch.ones(1000) for _ in groups]
    for _ in range(3):
        works = [group.allreduce([tensor]) for group, tensor in zip(groups, tensors)]
        for work in works:
            work.wait()
    assert all(tensor.eq(27.0).all() for tensor in tensors)


def test_a_device_can_be_closed_before_and_after_it_stopped_to_listen() -> None:
    before = psutil.Process().num_fds()
    for stops in (False, True, True):
        device = Device("127.0.0.9")
        assert len(ports("127.0.0.9")) == 1
        if stops:
            device.stop_listening()
            device.stop_listening()
            assert ports("127.0.0.9") == []
        del device
        assert ports("127.0.0.9") == []
    assert psutil.Process().num_fds() <= before


def test_a_group_is_not_formed_with_a_stranger_in_a_members_place(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stranger sends what gloo takes for a member, and then nothing. The step would wait forever."""
    strangers: list[socket.socket] = []

    def disturbed(host: str) -> Device:
        known = set(ports(host))
        device = Device(host)
        for port in set(ports(host)) - known:
            for number in range(8):
                strangers.append(socket.create_connection((host, port)))
                strangers[-1].sendall(number.to_bytes(8, "little"))
        return device

    monkeypatch.setattr(group_module, "Device", disturbed)
    monkeypatch.setattr(group_module, "PROOF_S", 1.0)
    monkeypatch.setattr(group_module, "FORM_TIMEOUT_S", 5.0)
    futures = form(pool, "127.0.0.10")
    assert any(future.exception(60) is not None for future in futures)
    for stranger in strangers:
        stranger.close()


def test_a_member_without_the_secret_is_found_out(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    futures = form(pool, "127.0.0.11", {"w2": b"a guess"})
    for future in futures[:2]:
        assert "took the place of w2" in str(future.exception(60))
