"""Ctrl-C, heeded between two decisions.

Python raises it wherever it happens to be. In the middle of a compiled kernel that becomes another error, in the
middle of a decision it leaves half of it behind, and while a compiled kernel is written to disk it may leave the new
name of an old one. Only compiling, which may take many seconds, is broken off.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

#: Where compiling must not be broken off: C calls Python there, or what was compiled is written.
_NOT_IN = ("llvmlite.binding.executionengine", "numba.core.caching")
_A_MOMENT_S = 0.02


class Interrupt:
    """Whether the user asked to stop. Who asks again, because it takes long, is obeyed at once."""

    def __init__(self) -> None:
        self.asked = False
        #: A Ctrl-C that came where nothing can be broken off comes again from here.
        self._echo: threading.Timer | None = None

    def __call__(self, signal_number: int, frame: FrameType | None) -> None:
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
    """Keep Ctrl-C for whoever looks. Where another handles it, or in another thread, nothing is changed."""
    interrupt = Interrupt()
    ours = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    if ours:
        signal.signal(signal.SIGINT, interrupt)
    try:
        yield interrupt
    finally:
        if ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
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
