"""Ctrl-C, heeded between two decisions.

Python raises it wherever it happens to be. In the middle of a compiled kernel that becomes another error, and in the
middle of a decision it leaves half of it behind.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Interrupt:
    """Whether the user asked to stop. Who asks again, because it takes long, is obeyed at once."""

    asked = False

    def __call__(self, signal_number: int, frame: Any) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True


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


def is_interrupt(error: BaseException) -> bool:
    """Whether this is Ctrl-C, or what a compiled kernel makes of it."""
    return isinstance(error, KeyboardInterrupt) or (
        isinstance(error, SystemError) and isinstance(error.__cause__, KeyboardInterrupt)
    )
