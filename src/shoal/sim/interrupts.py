"""Signals that end a simulation: Ctrl-C, and in a command also SIGTERM and SIGHUP.

The first signal ends the simulation between two decisions, and the results so far are kept. Raising
`KeyboardInterrupt` at once would leave a decision half made. A second signal does raise it, because a
decision, or the compilation of a kernel, may take long. The exit code of a command is 128 plus the first signal.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

#: The signals that ask a command to end.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stop:
    """Signal handler of a command. The first signal raises `KeyboardInterrupt`; a second one exits at once."""

    def __init__(self) -> None:
        #: The number of the first signal; 0 if there was none.
        self.first = 0
        self.exiting = False

    @property
    def exit_code(self) -> int:
        return 128 + (self.first or signal.SIGINT)

    def note(self, signal_number: int) -> None:
        self.first = self.first or signal_number

    def __call__(self, signal_number: int, frame: FrameType | None) -> None:
        self.note(signal_number)
        if self.exiting:
            os._exit(self.exit_code)
        self.exiting = True
        raise KeyboardInterrupt


#: One per process, because a process runs one command.
stop = Stop()


@contextmanager
def stoppable() -> Iterator[None]:
    """Handle SIGTERM and SIGHUP like Ctrl-C. A signal that the process ignores, as under nohup, stays ignored."""
    before = _set(stop, (signal.SIG_DFL, signal.default_int_handler))
    try:
        yield
    finally:
        # After an interrupt, the process exits with that exit code. Ignore signals that come while it exits.
        _restore(dict.fromkeys(before, signal.SIG_IGN) if stop.first else before)


@contextmanager
def handled_by(handler: Any) -> Iterator[None]:
    """Use this handler in place of `stop` or Python's own. Do nothing if another is set, or in another thread."""
    before = _set(handler, (signal.default_int_handler, stop))
    try:
        yield
    finally:
        _restore(before)


@contextmanager
def held() -> Iterator[Callable[[], None]]:
    """Block signals until the yielded function is called. Processes started before that never receive them."""
    from multiprocessing import resource_tracker

    def release() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    resource_tracker.ensure_running()  # or the first process would start it, which unblocks signals
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield release
    finally:
        release()


def _set(handler: Any, in_place_of: tuple[Any, ...]) -> dict[signal.Signals, Any]:
    """Replace the handler of each signal that has one of these; return the replaced handlers."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    before = {number: signal.getsignal(number) for number in SIGNALS}
    before = {number: had for number, had in before.items() if had in in_place_of}
    for number in before:
        signal.signal(number, handler)
    return before


def _restore(before: dict[signal.Signals, Any]) -> None:
    for number, handler in before.items():
        signal.signal(number, handler)


class Interrupt:
    """Signal handler of a simulation: records that the user asked to stop. A second signal raises at once."""

    def __init__(self) -> None:
        self.asked = False

    def __call__(self, signal_number: int, frame: FrameType | None) -> None:
        stop.note(signal_number)
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True


@contextmanager
def heeded() -> Iterator[Interrupt]:
    """Record signals in the yielded object, which the simulation checks between decisions."""
    interrupt = Interrupt()
    with handled_by(interrupt):
        yield interrupt


def is_interrupt(error: BaseException) -> bool:
    """Whether this is a `KeyboardInterrupt`, or the `SystemError` that a compiled kernel turns it into."""
    return isinstance(error, KeyboardInterrupt) or (
        isinstance(error, SystemError) and isinstance(error.__cause__, KeyboardInterrupt)
    )
