"""Both sides of a handover by themselves: real state, and links that only record."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import pytest
from fakes import FakeSession, make_order, make_replica

import torch
from shoal.torch.handover import Handover
from shoal.torch.packing import as_bytes
from shoal.torch.receiver import Incoming
from shoal.wire.messages import Kind, Plan

PLAN = Plan(2, Kind.SWITCH, ("w0", "w1"), 1, ("w0",))


class FakeLink:
    """Records what the training thread asks for."""

    def __init__(self, nearly_done: bool = True) -> None:
        self.index, self.nearly_done = 0, nearly_done
        self.windows, self.ends, self.given = [], {}, []
        self.holding = self.loaded = False

    def load(self, plan, me, state) -> None:
        self.loaded = True

    def open_window(self, window) -> None:
        self.windows.append(window)
        self.holding = False

    def end_with(self, step: int, end: dict) -> None:
        self.ends.setdefault(step, end)

    def hold(self) -> None:
        self.holding = True

    def give(self, flat: torch.Tensor) -> None:
        self.given.append(flat)

    def wait_read(self, step: int, interrupted) -> None:
        assert not interrupted()

    def close_window(self, step: int, end: dict, interrupted) -> None:
        self.end_with(step, end)


class Side:
    """One worker's handover with its collaborators."""

    def __init__(self, session: FakeSession, seed: int) -> None:
        self.session, self.replica, self.order = session, make_replica(seed), make_order(session)
        self.replica.synchronize(25.0, lambda: None)
        self.handover = Handover(session, self.replica, self.order, session.reported.append)


GROWING = {"world_size": 2, "contributors": (0,), "next_contributors": (0, 1)}


def holder(*links: FakeLink) -> Side:
    """w0, which sends its state to w1."""
    return Side(FakeSession(**GROWING, sends_sums=True, links=list(links)), seed=1)


def newcomer() -> Side:
    return Side(FakeSession(**GROWING, name="w1", rank=1, receiver=FakeReceiver()), seed=2)


class FakeReceiver:
    def __init__(self) -> None:
        self.gates: list[int] = []
        self.over: list[int] = []

    def open_gate(self, incoming: Incoming, state, step: int, flats) -> None:
        self.gates.append(step)

    def finished(self, number: int) -> None:
        self.over.append(number)


def test_windows_follow_the_steps_and_the_last_one_describes_the_rest():
    link = FakeLink()
    side = holder(link)
    handover = side.handover
    handover.begin_sending(PLAN)
    assert link.loaded
    assert [(w.step, w.final, w.sums) for w in link.windows] == [(0, False, 1)]
    assert "description" in link.windows[0].head
    assert not handover.window_due
    handover.backward_ended()
    assert link.holding
    handover.sending.give(torch.zeros(3))
    assert len(link.given) == 1
    handover.close_window(stepping=True)
    assert link.ends[0].keys() == {"groups"}
    side.order.advance(8)
    assert handover.window_due
    handover.rest_fits_next = True
    handover.next_window()
    assert (link.windows[1].step, link.windows[1].final, link.windows[1].head) == (1, True, {})
    handover.backward_ended()
    assert link.ends[1].keys() == {"random", "description"}
    handover.close_window(stepping=True)
    assert side.session.links == [], "each link ends by itself once everything is read"
    assert handover.complete()
    assert handover.pause_s > 0


def test_a_first_generation_gets_everything_at_once():
    link = FakeLink()
    side = holder(link)
    side.session.contributors = (0, 1)
    side.handover.send_first(Plan(1, Kind.FIRST, ("w0", "w1")))
    (window,) = link.windows
    assert (window.final, window.sums, link.ends.keys()) == (True, 0, {0})
    assert pickle.loads(window.head["description"])["buffers"] == []


@pytest.mark.parametrize("nearly_done", [True, False])
def test_the_rest_fits_if_every_link_says_so(nearly_done: bool):
    side = holder(FakeLink(), FakeLink(nearly_done))
    handover, session = side.handover, side.session
    assert handover.rest_fits(0) is nearly_done
    session.links, session.coming = [], (PLAN, [FakeLink(nearly_done)])
    assert handover.rest_fits(2) is nearly_done
    handover.receiving.incoming = Incoming(PLAN, ("w0",))
    assert not handover.rest_fits(0), "a newcomer has nothing to send"


def send(source: Side, incoming: Incoming, target: Side, step: int, indices: range) -> None:
    """The pieces of some parameters arrive in a window, as `receiver.py` receives them."""
    state = source.replica.state
    pieces = [piece for piece, _ in state.pieces(float("inf")) if piece.index in indices]
    capture = state.pack(pieces)
    received, homes = target.replica.state.unpack(capture.description)
    for home, value in zip(homes, capture.large):
        as_bytes(home)[:] = as_bytes(value)
    incoming.arrived += [(step, got) for got in received]
    incoming.ended["w0"] = step


def test_a_newcomer_follows_the_holder_over_two_windows_and_ends_up_equal():
    link = FakeLink()
    source, target = holder(link), newcomer()
    incoming = Incoming(PLAN, ("w0",))
    source.order.advance(8)
    source.handover.begin_sending(PLAN)
    incoming.windows[1] = {"w0": {"final": False, **link.windows[0].head}}
    target.handover.begin_receiving(incoming)
    assert target.handover.catching_up
    assert target.handover.window_step == target.order.position.step == 1
    target.handover.open_gate()
    assert target.session.receiver.gates == [1]

    send(source, incoming, target, 1, range(1))  # the weight, not the bias
    assert target.handover.take_window()
    theirs, mine = source.replica.state, target.replica.state
    theirs.optimizers[0].param_groups[0]["lr"] = 0.5  # by a schedule
    source.handover.close_window(stepping=True)
    incoming.ends[1] = {"w0": link.ends[1]}
    for p in (*theirs.parameters, *mine.parameters):
        p.grad = torch.ones_like(p)
    bias = mine.model.bias.detach().clone()
    theirs.optimizers[0].step()
    with target.handover.partial_step():
        mine.optimizers[0].step()
    assert torch.equal(mine.model.weight, theirs.model.weight)
    assert torch.equal(mine.model.bias, bias), "it comes later, with this step applied"

    for side in (source, target):
        side.order.advance(8)
    source.session.done = 2
    source.handover.rest_fits_next = True
    source.handover.next_window()
    source.handover.backward_ended()
    target.handover.next_window()
    incoming.windows[2] = {"w0": {"final": True}}
    incoming.ends[2] = {"w0": link.ends[2]}
    send(source, incoming, target, 2, range(1, 2))
    assert target.handover.take_window()
    assert mine.digest() == theirs.digest()
    assert target.session.reported == [("complete", 2)]
    assert target.session.receiver.over == [2]


def test_a_window_that_lacks_a_piece_is_not_the_whole_state():
    target, incoming = newcomer(), Incoming(PLAN, ("w0",))
    incoming.windows[0] = {"w0": {"final": True, "description": b""}}
    incoming.ended["w0"] = 0
    target.handover.receiving.incoming = incoming
    assert not target.handover.take_window()
    assert target.session.reported == ["the state arrived incomplete"]


def test_a_worker_that_cannot_take_the_state_says_why():
    handover = newcomer().handover
    handover.receiving.incoming = Incoming(PLAN, ("w0",), broken="from w0", failure=MemoryError("no room"))
    with pytest.raises(RuntimeError, match="could not receive the state: MemoryError"):
        handover.take_window()


def test_a_transfer_that_breaks_ends_without_the_state():
    target = newcomer()
    target.session.receiver.get = lambda number: SimpleNamespace(broken="from w0", offered=None)
    assert not target.handover.receive_first(PLAN)
