"""Streaming the state from the holders to newcomers, window by window, beside the training.

A *window* lasts from one optimizer step to the next: in it parameters and optimizer state do not change. `Sending` is
the holder's side, `Receiving` the newcomer's. `Handover` owns the present window and calls both at the points of a
step where they have to act. The threads that move the bytes are in `transfer.py` and `receiving.py`.
"""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from shoal.torch.data_order import DataOrder
from shoal.torch.receiving import Incoming, Receiver
from shoal.torch.replica import Replica
from shoal.torch.state import ModelState, random_state, seed_all, set_random_state
from shoal.torch.transfer import Link, Window
from shoal.wire.messages import Plan
from torch import Tensor


class Peers(Protocol):
    """What a handover needs of the membership: a `Session`."""

    @property
    def name(self) -> str: ...

    @property
    def rank(self) -> int: ...

    @property
    def on_gpu(self) -> bool: ...

    @property
    def growing(self) -> bool: ...

    @property
    def relays(self) -> bool: ...

    @property
    def sends_sums(self) -> bool: ...

    @property
    def interrupted(self) -> bool: ...

    @property
    def links(self) -> list[Link]: ...

    def release_links(self) -> None: ...

    def coming_links(self, flag: int) -> tuple[Plan, list[Link]] | None: ...

    @property
    def receiver(self) -> Receiver: ...

    @property
    def lock(self) -> threading.Condition: ...

    def wait_for(self, ready: Callable[[], Any]) -> Any: ...

    def state_complete(self, step: int) -> None: ...


class Sending:
    """The holder's side. Its links are those of the present generation."""

    def __init__(self, peers: Peers, replica: Replica, order: DataOrder) -> None:
        self._peers, self._replica, self._order = peers, replica, order

    @property
    def busy(self) -> bool:
        return bool(self._peers.links)

    def rest_fits(self, flag: int) -> bool:
        """Whether one window is enough for what this worker has still to send; `flag` as in the vote."""
        state = self._replica.state
        if coming := self._peers.coming_links(flag):
            plan, links = coming
            self._load(plan, links)
            return not state.divisible or all(link.nearly_done for link in links)
        return not self._peers.growing or all(link.nearly_done for link in self._peers.links)

    def begin(self, plan: Plan) -> None:
        """Decide what to send to the newcomers of a plan. Without holders, rank 0 is the only source."""
        self._load(plan, self._peers.links)

    def _load(self, plan: Plan, links: list[Link]) -> None:
        for link in links:
            link.load(plan, self._peers.name, self._replica.state)

    def open(self, step: int, final: bool, first: bool) -> None:
        """Send from here on. The first window describes the state."""
        links, buckets = self._peers.links, self._replica.buckets
        # The first generation gets everything at once: its members wait for it before their first step.
        at_once = final and not self._peers.growing
        head = {}
        if first and any(link.index == 0 for link in links):
            head["description"] = self._replica.state.describe(self._facts(), whole=at_once)
        sums = len(buckets.buckets) if self._peers.relays and buckets is not None else 0
        for link in links:
            link.open_window(Window(step, final, head if link.index == 0 else {}, sums))
            if at_once:
                link.end_with(step, {})

    def hold(self) -> None:
        """Begin no further piece, except in the final window: the optimizer step is near."""
        for link in self._peers.links:
            link.hold()

    def describe_rest(self, step: int) -> None:
        """In the final window: everything but parameters, as it is at the end of backward.

        The newcomer adopts it at the end of its own backward. So it includes what the script and the model did in
        this step so far (buffers, random numbers, counters in `job.state`), and both do the rest of the step.
        """
        links, buckets = self._peers.links, self._replica.buckets
        if not links:
            return
        assert buckets is not None
        end: dict[str, Any] = {"random": (self._peers.name, random_state(self._peers.on_gpu))}
        described = {}
        if any(link.index == 0 for link in links):
            facts = {**self._facts(), "good": buckets.good_on_host}
            described["description"] = self._replica.state.describe(facts)
        for link in links:
            link.end_with(step, {**end, **described} if link.index == 0 else end)

    def give(self, flat: Tensor) -> None:
        """Send the summed gradients of a bucket."""
        if self._peers.sends_sums:
            for link in self._peers.links:
                link.give(flat)

    def wait_read(self, step: int) -> None:
        """Wait until the live tensors are read: from here on the script may change parameters."""
        for link in self._peers.links:
            link.wait_read(step, lambda: self._peers.interrupted)

    def close(self, step: int, final: bool, stepping: bool) -> None:
        """Wait for what is being sent, before the optimizer changes the state."""
        links = self._peers.links
        end = {"groups": self._replica.state.groups()} if stepping else {}
        for link in links:
            link.hold()
        for link in links:
            link.close_window(step, end, lambda: self._peers.interrupted)
        if final:
            self._peers.release_links()

    def _facts(self) -> dict[str, Any]:
        return {**self._order.facts(), "random": None}


class Receiving:
    """The newcomer's side: what it receives for its plan, until it has the whole state."""

    def __init__(self, peers: Peers, replica: Replica, order: DataOrder, note: Callable[[str], None]) -> None:
        self._peers, self._replica, self._order, self._note = peers, replica, order, note
        self.incoming: Incoming | None = None

    def begin(self, incoming: Incoming) -> tuple[int, bool]:
        """Adopt the description in the first window; return that window's step and whether it is the final one.

        It comes without buffers and large tensors of `job.state`: those follow in the final window.
        """
        with self._peers.lock:
            step = incoming.offered
            assert step is not None
            description, final = incoming.description(step), incoming.is_final(step)
        assert description is not None
        facts = pickle.loads(description)
        self._order.adopt(facts)
        self._replica.state.adopt(facts)
        self.incoming = incoming
        return step, final

    def take_at_once(self, plan: Plan) -> bool:
        """Wait for the only window of a first generation and install it. False if it did not arrive completely."""
        peers, incoming = self._peers, self._peers.receiver.get(plan.number)

        def begun() -> bool:
            return incoming is not None and (bool(incoming.broken) or incoming.offered is not None)

        peers.wait_for(lambda: peers.interrupted or begun())
        step = incoming.offered if incoming is not None else None
        if incoming is None or step is None:
            return False
        self.open_gate(incoming, step)
        return self.take_window(incoming, step)

    def open_gate(self, incoming: Incoming, step: int) -> None:
        """From here on the pieces and sums of this window may be written into the state and the buckets."""
        buckets = self._replica.buckets
        assert buckets is not None
        if self._peers.relays:
            buckets.let_go()
        flats = [bucket.flat for bucket in buckets.buckets]
        self._peers.receiver.open_gate(incoming, self._replica.state, step, flats)

    def take_window(self, incoming: Incoming, step: int) -> bool:
        """Wait for the end of a window and install its pieces. False if it did not arrive completely."""
        peers, state = self._peers, self._replica.state
        with peers.lock:
            peers.wait_for(lambda: incoming.broken or peers.interrupted or incoming.has_ended(step))
            if incoming.failure is not None:
                raise RuntimeError(f"this worker could not receive the state: {incoming.failure!r}")
            if not incoming.has_ended(step):
                return False
            received = incoming.take(step)
        state.install(received)
        if not incoming.is_final(step):
            return True
        description = incoming.description(step)
        whole = all(incoming.have.get(i) == p.numel() for i, p in enumerate(state.parameters))
        if description is None or not whole:
            self._note("the state arrived incomplete")
            return False
        self._adopt(pickle.loads(description), incoming, step)
        peers.receiver.finished(incoming.plan.number)
        peers.state_complete(self._order.position.step)
        return True

    def _adopt(self, facts: dict[str, Any], incoming: Incoming, step: int) -> None:
        self._replica.state.adopt(facts)
        self._order.adopt(facts)
        if self._replica.buckets is not None:
            self._replica.buckets.good = facts.get("good")
        # The random state of the member whose place this worker takes, if there is one; otherwise its own.
        before = incoming.plan.replaces.get(self._peers.name)
        states = dict(h["random"] for h in incoming.ends.get(step, {}).values() if "random" in h)
        if before in states:
            set_random_state(states[before])
        else:
            seed_all(hash((facts["seed"], self._order.position.step, self._peers.rank)))

    def follow_groups(self, incoming: Incoming) -> None:
        """Use the holders' learning rates: the script's own may depend on what has not arrived yet."""
        ends = incoming.ends.get(self._order.position.step, {}).values()
        groups = [h["groups"] for h in ends if "groups" in h]
        if groups:
            self._replica.state.set_groups(groups[0])


@contextmanager
def received_only(state: ModelState, received: Collection[int]) -> Iterator[None]:
    """Within it an optimizer step changes only the parameters of which something has been `received`.

    The others are sent later, with this step already applied.
    """
    hidden = [(p, p.grad) for i, p in enumerate(state.parameters) if i not in received]
    for param, _ in hidden:
        param.grad = None
    try:
        yield
    finally:
        for param, grad in hidden:
            param.grad = grad


class Handover:
    def __init__(self, peers: Peers, replica: Replica, order: DataOrder, note: Callable[[str], None]) -> None:
        self._peers, self._replica, self._order = peers, replica, order
        self.sending = Sending(peers, replica, order)
        self.receiving = Receiving(peers, replica, order, note)
        #: The steps done when the present window was opened.
        self.window_step = 0
        #: After the present step all newcomers have the whole state.
        self.final = False
        #: The next window can be the final one.
        self.rest_fits_next = False
        #: How long the training has waited for this handover.
        self.pause_s = 0.0

    @property
    def catching_up(self) -> bool:
        """This worker is a newcomer that has only part of the state."""
        return self.receiving.incoming is not None

    # Between two steps

    def send_first(self, plan: Plan) -> None:
        """In a first generation: send everything now."""
        self.final = True
        self._send(plan)

    def begin_sending(self, plan: Plan) -> None:
        """Begin to send the state to the newcomers of a plan."""
        self.final = self.rest_fits_next
        self._send(plan)

    def _send(self, plan: Plan) -> None:
        self.sending.begin(plan)
        self._open_window(first=True)

    def receive_first(self, plan: Plan) -> bool:
        """In a first generation: receive everything now. False if it did not arrive."""
        self.final = True
        return self.receiving.take_at_once(plan)

    def begin_receiving(self, incoming: Incoming) -> None:
        """Begin to receive the state. The gate of the first window is still closed."""
        self.window_step, self.final = self.receiving.begin(incoming)

    def open_gate(self) -> None:
        if self.receiving.incoming is not None:
            self.receiving.open_gate(self.receiving.incoming, self.window_step)

    @property
    def window_due(self) -> bool:
        """A step is done in the present window, and newcomers need another one."""
        return self._peers.growing and self._order.position.step > self.window_step

    def next_window(self) -> None:
        """The final one if all holders voted that the rest fits into it."""
        with self._pausing():
            self.final = self.rest_fits_next
            self._open_window()

    def _open_window(self, first: bool = False) -> None:
        """From here to the next optimizer step the state does not change."""
        self.window_step = self._order.position.step
        self.open_gate()
        self.sending.open(self.window_step, self.final, first)

    # Within a step

    def backward_ended(self) -> None:
        if self._peers.growing:
            self.sending.hold()
            if self.final:
                with self._pausing():
                    self.sending.describe_rest(self.window_step)

    def take_window(self) -> bool:
        """For a newcomer at the end of its backward. False: the window did not arrive completely."""
        assert self.receiving.incoming is not None
        return self.receiving.take_window(self.receiving.incoming, self._order.position.step)

    def rest_fits(self, flag: int) -> bool:
        """What this worker says in the vote."""
        return not self.catching_up and self.sending.rest_fits(flag)

    def plan_window(self, flag: int) -> None:
        """Decide alone what members otherwise decide by their vote."""
        self.rest_fits_next = self.rest_fits(flag)

    def wait_read(self) -> None:
        """At the end of backward: from here on the script may change parameters and gradients."""
        if self._peers.growing:
            with self._pausing():
                self.sending.wait_read(self.window_step)

    def close_window(self, stepping: bool) -> None:
        """Before the optimizer step (`stepping`), or at the end of a step that had none."""
        if self.sending.busy:
            with self._pausing():
                self.sending.close(self.window_step, self.final, stepping)

    @contextmanager
    def partial_step(self) -> Iterator[None]:
        """Within it the optimizer of a newcomer changes only what it has received."""
        incoming = self.receiving.incoming
        if incoming is None or self.final:
            yield
            return
        self.receiving.follow_groups(incoming)
        with received_only(self._replica.state, incoming.have):
            yield

    # The end

    def complete(self) -> bool:
        """After a step: whether newcomers have received everything in it."""
        return self._peers.growing and self.final

    def end(self) -> None:
        """Nothing is streamed any more."""
        self.receiving.incoming = None
        self.final, self.pause_s = False, 0.0

    @contextmanager
    def _pausing(self) -> Iterator[None]:
        began_s = time.perf_counter()
        try:
            yield
        finally:
            self.pause_s += time.perf_counter() - began_s
