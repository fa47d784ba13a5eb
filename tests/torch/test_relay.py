"""A real link between a holder and a newcomer: what may change when."""

from __future__ import annotations

import threading

import pytest

pytest.importorskip("torch")

import torch
from shoal.torch.receiver import Receiver
from shoal.torch.state import ModelState, StateBox
from shoal.torch.stream import Streams
from shoal.torch.transfer import Link, Window
from shoal.wire.messages import Kind, Plan
from torch import nn

SECRET = bytes(32)


def state(seed: int) -> ModelState:
    torch.manual_seed(seed)
    model = nn.Linear(4, 4)
    return ModelState([model], [torch.optim.SGD(model.parameters(), lr=0.1)], StateBox())


def test_sums_may_change_once_they_are_read_and_the_holder_waits_for_that():
    lock = threading.Condition(threading.RLock())
    streams = Streams("job", "127.0.0.1", SECRET, None)
    receiver = Receiver(streams, lock)
    plan = Plan(2, Kind.SWITCH, ("w0", "w1"), 1, ("w0",), {"w1": receiver.address})
    receiver.expect(plan, "w1")
    holder, newcomer = state(1), state(2)
    sums = [torch.randn(1 << 22), torch.randn(1000)]  # far more than the sockets' buffers
    sent = [flat.clone() for flat in sums]
    link = Link.open(plan, "w1", "w0", streams, None)
    link.load(plan, "w0", holder)
    link.open_window(Window(7, False, {}, len(sums)))
    link.hold()
    for flat in sums:
        link.give(flat)

    def go_on() -> None:
        link.wait_read(7, lambda: False)
        for flat in sums:
            flat.zero_()  # as a script does when it clips
        link.close_window(7, {}, lambda: False)

    going_on = threading.Thread(target=go_on)
    going_on.start()
    going_on.join(0.2)
    assert going_on.is_alive(), "the newcomer has not come to this window yet"
    incoming = receiver.get(2)
    assert incoming is not None
    flats = [torch.full_like(flat, torch.nan) for flat in sums]
    receiver.open_gate(incoming, newcomer, 7, flats)
    with lock:
        assert lock.wait_for(lambda: incoming.has_ended(7) or incoming.broken, 30)
    assert incoming.broken is None
    assert all(torch.equal(a, b) for a, b in zip(flats, sent))
    going_on.join(30)
    link.close()
    receiver.close()
