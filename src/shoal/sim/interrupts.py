"""Ctrl-C, heeded between two decisions; in a command SIGTERM and SIGHUP do the same, and its exit code tells which.

Python raises it wherever it happens to be. In the middle of a compiled kernel that becomes another error, in the
middle of a decision it leaves half of it behind, and while a compiled kernel is written to disk it may leave the new
name of an old one. Only compiling, which may take many seconds, is broken off.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

#: Where compiling must not be broken off: C calls Python there, or what was compiled is written.
_NOT_IN = ("llvmlite.binding.executionengine", "numba.core.caching")
_A_MOMENT_S = 0.02
#: What asks a command to end.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stop:
    """Breaks a command off. Who asks again while it is on its way out does not wait for it."""

    def __init__(self) -> None:
        #: The signal that came first.
        self.first = 0
        self.on_its_way_out = False

    @property
    def exit_code(self) -> int:
        return 128 + (self.first or signal.SIGINT)

    def note(self, signal_number: int) -> None:
        self.first = self.first or signal_number

    def __call__(self, signal_number: int, frame: FrameType | None) -> None:
        self.note(signal_number)
        if self.on_its_way_out:
            os._exit(self.exit_code)
        self.on_its_way_out = True
        raise KeyboardInterrupt


#: Of this process: it runs one command.
stop = Stop()


@contextmanager
def stoppable() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end what is done here as Ctrl-C does. What is ignored, as by nohup, stays ignored."""
    usual = (signal.SIG_DFL, signal.default_int_handler)
    before = _set(stop, usual)
    try:
        yield
    finally:
        # Once interrupted, the process ends with that exit code whatever comes: Python would not hear of it any more.
        _restore(dict.fromkeys(before, signal.SIG_IGN) if stop.first else before)


@contextmanager
def handled_by(handler: Any) -> Iterator[None]:
    """Hand what would break off to a handler. Where another handles it, or in another thread, nothing is changed."""
    before = _set(handler, (signal.default_int_handler, stop))
    try:
        yield
    finally:
        _restore(before)


@contextmanager
def held() -> Iterator[Callable[[], None]]:
    """Let signals wait until what is yielded is called: processes that are started before that never hear of them."""
    from multiprocessing import resource_tracker

    def release() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    resource_tracker.ensure_running()  # or the first process would start it, and that lets signals through
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield release
    finally:
        release()


def _set(handler: Any, in_place_of: tuple[Any, ...]) -> dict[signal.Signals, Any]:
    """Set the handler of signals that have one of these; what they had."""
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
    """Whether the user asked to stop. Who asks again, because it takes long, is obeyed at once."""

    def __init__(self) -> None:
        self.asked = False
        #: A Ctrl-C that came where nothing can be broken off comes again from here.
        self._echo: threading.Timer | None = None

    def __call__(self, signal_number: int, frame: FrameType | None) -> None:
        stop.note(signal_number)
        again, self._echo = self._echo is None and self.asked, None
        if _is_in(frame, *_NOT_IN):
            self._echo = threading.Timer(_A_MOMENT_S, os.kill, (os.getpid(), signal.SIGINT))
            self._echo.start()
            return
        self.asked = True
        if again or _is_in(frame, "numba.core.compiler_machinery"):
            raise KeyboardInterrupt

    def forget(self) -> None:
        if self._echo:
            self._echo.cancel()


@contextmanager
def heeded() -> Iterator[Interrupt]:
    """Keep Ctrl-C, or what else ends this command, for whoever looks."""
    interrupt = Interrupt()
    try:
        with handled_by(interrupt):
            yield interrupt
    finally:
        interrupt.forget()


def saves(frame: FrameType | None) -> bool:
    """Whether a compiled kernel is being written to disk in this frame, or read."""
    return _is_in(frame, "numba.core.caching")


def _is_in(frame: FrameType | None, *modules: str) -> bool:
    while frame is not None:
        if frame.f_globals.get("__name__") in modules:
            return True
        frame = frame.f_back
    return False


def is_interrupt(error: BaseException) -> bool:
    """Whether this is Ctrl-C, or what a compiled kernel makes of it."""
    return isinstance(error, KeyboardInterrupt) or (
        isinstance(error, SystemError) and isinstance(error.__cause__, KeyboardInterrupt)
    )
