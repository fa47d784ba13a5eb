"""Reports to the coordinator how the script ends: normally, by an exception or by `sys.exit`."""

from __future__ import annotations

import atexit
import os
import sys
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn, Protocol

from shoal.torch.advice import advice_for


class Reporter(Protocol):
    """A `Session`."""

    @property
    def training(self) -> bool: ...

    def fail(self, why: str) -> None: ...

    def await_end(self) -> None: ...


def report_exit(session: Reporter, finish: Callable[[], None]) -> None:
    """Replace `sys.excepthook` and `sys.exit`, and act at the end of the process."""
    previous, leave = sys.excepthook, sys.exit
    codes: list[Any] = []
    me = os.getpid()

    def fail(why: str) -> None:
        if os.getpid() == me:  # not in a process that the script has forked
            session.fail(why)

    def failed(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if advice := advice_for(error):
            error.add_note(advice)  # the last line of what is reported and printed
        fail("".join(traceback.format_exception(kind, error, trace)))
        previous(kind, error, trace)

    def leaving(status: Any = None, /) -> NoReturn:
        codes.append(status)
        leave(status)

    def finish_or_fail() -> None:
        try:
            finish()
        except Exception:  # one that the script has caught before
            fail(traceback.format_exc())
            raise

    def ended() -> None:
        if os.getpid() != me:
            return
        if session.training:
            if codes and codes[-1]:
                fail(f"the script called sys.exit({codes[-1]!r})")
            else:
                finish_or_fail()
        session.await_end()

    sys.excepthook, sys.exit = failed, leaving
    atexit.register(ended)
