"""Streaming the state from the holders to newcomers, window by window, beside the training.

A *window* lasts from one optimizer step to the next: in it parameters and optimizer state do not change. `Handover`
owns the present window. It calls `Sending` (the holder's side) and `Receiving` (the newcomer's side) at the points of a
step where they have to act. The threads that move the bytes are in `transfer.py` and `receiver.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from shoal.torch.data_order import DataOrder
from shoal.torch.receiver import Incoming
from shoal.torch.receiving import Newcomer, Receiving, received_only
from shoal.torch.replica import Replica
from shoal.torch.sending import Holder, Sending
from shoal.wire.messages import Plan


class Peers(Holder, Newcomer, Protocol):
    """A `Session`: a worker may be a holder or a newcomer."""


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
        """In a first generation, or with several optimizers: send everything now."""
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
        """In a first generation, or with several optimizers: receive everything now. False if it did not arrive."""
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
        if self._replica.shard_set is not None:
            return False  # its rows move at the switch, and nothing is streamed
        return not self.catching_up and self.sending.rest_fits(flag)

    def plan_window(self, flag: int) -> None:
        """Decide alone what members otherwise decide by their vote."""
        self.rest_fits_next = self.rest_fits(flag)

    def wait_read(self) -> None:
        """At the end of backward: from here on the script may change parameters and gradients."""
        if self.sending.busy:
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
