"""The server's clock: seconds since 1970 that never go back, even if the machine's clock is set.

The wall clock is read once, when the server starts; from then on the clock counts monotonic time. The keepers
of workers report by the same monotonic clock how long ago something happened. If the wall clock was set while
no server ran, `go_on` moves the times in the store onto the new clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, overload

from shoal.executors.keeper import boot_id
from shoal.server.loop import snapshot

if TYPE_CHECKING:
    from shoal.server.store.store import Store


class Clock:
    """Reads the wall clock once and counts on monotonically; `floor_s` is a time known to have passed already.

    The floor is the last moment in the store: after a restart with the machine's clock set back, time continues
    from there and no moment occurs twice.
    """

    def __init__(
        self,
        floor_s: float = 0.0,
        *,
        wall: Callable[[], float] | None = None,
        steady: Callable[[], float] | None = None,
    ) -> None:
        self._wall, self._steady = wall or time.time, steady or time.monotonic
        #: This clock's time when the steady clock was at zero.
        self.offset_s = max(self._wall(), floor_s) - self._steady()

    def now_s(self) -> float:
        return self.offset_s + self._steady()

    def machine_ahead_s(self) -> float:
        """How far the machine's clock is ahead of this one: it was set since the server started."""
        return self._wall() - self.now_s()


#: A server's clock that is so far ahead of the machine's does not meet it again soon.
AHEAD_S = 86_400.0


def warn_of_clock(clock: Clock) -> str | None:
    """A warning if the machine's clock was far ahead once: the server's clock never goes back by itself."""
    ahead_s = -clock.machine_ahead_s()
    if ahead_s <= AHEAD_S:
        return None
    return (
        f"the server's clock is {ahead_s / 86400:.1f} days ahead: the machine's was wrong once, so tokens expire early "
        "and times are wrong: `shoal down --keep-jobs` and `shoal up --reset-clock`"
    )


def go_on(store: Store, clock: Clock | None = None, boot: str | None = None, *, reset: bool = False) -> Clock:
    """A clock for a new server on this store. Durations in progress continue by the steady clock.

    After a reboot the steady clock starts at zero: only then the wall clock measures the time in between.
    `reset`: the machine's clock was once far ahead and is right now. Recorded times in the future become now.
    """
    clock = clock or Clock(0.0 if reset else store.last_event()[1])
    boot = boot_id() if boot is None else boot
    before: dict[str, Any] = store.get("clock") or {}
    ledger, saved = store.get("ledger"), store.get(snapshot.KEY)
    with store.change(clock.now_s()) as change:
        if boot and before.get("boot") == boot:
            jump_s = clock.offset_s - before["offset_s"]
            change.move_settled(jump_s)
            if ledger is not None:
                change.put("ledger", _moved(ledger, jump_s))
            if saved is not None and jump_s:
                change.put(snapshot.KEY, snapshot.shifted(saved, jump_s))
        if reset:
            change.no_later_than(clock.now_s())
            change.event("server.clock_reset", "the server's clock was set to the machine's")
        change.put("clock", {"boot": boot, "offset_s": clock.offset_s})
    return clock


def _moved(ledger: dict[str, Any], jump_s: float) -> dict[str, Any]:
    state = ledger["state"]
    times = [at_s + jump_s for at_s in state["times"]]
    return ledger | {"state": state | {"now_s": state["now_s"] + jump_s, "times": times}}


@overload
def as_time(seconds: float) -> datetime: ...


@overload
def as_time(seconds: float | None) -> datetime | None: ...


def as_time(seconds: float | None) -> datetime | None:
    """Seconds since 1970 as the API writes them."""
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC)
