"""The newcomer's side of a handover: what the training thread does with the pieces that have arrived."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from shoal.torch.data_order import DataOrder
from shoal.torch.receiver import Incoming, Receiver
from shoal.torch.replica import Replica
from shoal.torch.state import ModelState, seed_all, set_random_state
from shoal.wire.messages import Plan


class Newcomer(Protocol):
    """What a newcomer needs of the membership: a `Session`."""

    @property
    def name(self) -> str: ...

    @property
    def rank(self) -> int: ...

    @property
    def relays(self) -> bool: ...

    @property
    def interrupted(self) -> bool: ...

    @property
    def receiver(self) -> Receiver: ...

    @property
    def lock(self) -> threading.Condition: ...

    def wait_for(self, ready: Callable[[], Any]) -> Any: ...

    def state_complete(self, step: int) -> None: ...


class Receiving:
    """The newcomer's side: what it receives for its plan, until it has the whole state."""

    def __init__(
        self, newcomer: Newcomer, replica: Replica, order: DataOrder, note: Callable[[str], None]
    ) -> None:
        self._newcomer, self._replica, self._order, self._note = newcomer, replica, order, note
        self.incoming: Incoming | None = None

    def begin(self, incoming: Incoming) -> tuple[int, bool]:
        """Adopt the description in the first window; return that window's step and whether it is the final one.

        It comes without buffers and large tensors of `job.state`: those follow in the final window.
        """
        with self._newcomer.lock:
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
        newcomer, incoming = self._newcomer, self._newcomer.receiver.get(plan.number)

        def begun() -> bool:
            return incoming is not None and (bool(incoming.broken) or incoming.offered is not None)

        newcomer.wait_for(lambda: newcomer.interrupted or begun())
        step = incoming.offered if incoming is not None else None
        if incoming is None or step is None:
            return False
        self.open_gate(incoming, step)
        return self.take_window(incoming, step)

    def open_gate(self, incoming: Incoming, step: int) -> None:
        """From here on the pieces and sums of this window may be written into the state and the buckets."""
        buckets = self._replica.buckets
        assert buckets is not None
        if self._newcomer.relays:
            buckets.let_go()
        flats = [bucket.flat for bucket in buckets.buckets]
        self._newcomer.receiver.open_gate(incoming, self._replica.state, step, flats)

    def take_window(self, incoming: Incoming, step: int) -> bool:
        """Wait for the end of a window and install its pieces. False if it did not arrive completely."""
        newcomer, state = self._newcomer, self._replica.state
        with newcomer.lock:
            newcomer.wait_for(lambda: incoming.broken or newcomer.interrupted or incoming.has_ended(step))
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
        facts = pickle.loads(description)
        self._adopt(facts, incoming, step)
        newcomer.receiver.finished(incoming.plan.number)
        newcomer.state_complete(facts["done"])
        return True

    def _adopt(self, facts: dict[str, Any], incoming: Incoming, step: int) -> None:
        self._replica.state.adopt(facts)
        self._order.adopt(facts)
        if self._replica.buckets is not None:
            self._replica.buckets.good = facts.get("good")
        # The random state of the member whose place this worker takes, if there is one; otherwise its own.
        before = incoming.plan.replaces.get(self._newcomer.name)
        states = dict(h["random"] for h in incoming.ends.get(step, {}).values() if "random" in h)
        if before in states:
            set_random_state(states[before])
        else:
            seed_all(hash((facts["seed"], self._order.position.step, self._newcomer.rank)))

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
    hidden = [(p, p.grad) for i, p in enumerate(state.trained) if i not in received]
    for param, _ in hidden:
        param.grad = None
    try:
        yield
    finally:
        for param, grad in hidden:
            param.grad = grad
