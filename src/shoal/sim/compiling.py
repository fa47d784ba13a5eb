"""Numba compiles a kernel when it is first used, and caches it on disk: when that begins, and how long it takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from numba.core.event import TimingListener, install_listener


class Compiling(TimingListener):  # type: ignore[misc, unused-ignore] # numba has no type hints
    """Receives numba's events. Loading a kernel from the cache is not one."""

    def __init__(self, begins: Callable[[], None] | None) -> None:
        super().__init__()
        self._begins = begins

    def on_start(self, event: Any) -> None:
        begins, self._begins = self._begins, None
        if begins:
            begins()
        super().on_start(event)

    @property
    def seconds(self) -> float:
        return float(self.duration) if self.done else 0.0


@contextmanager
def compiling(begins: Callable[[], None] | None = None) -> Iterator[Compiling]:
    """Call `begins` when the first kernel is compiled in this context, and add up the time of all kernels."""
    with install_listener("numba:compile", Compiling(begins)) as listener:
        yield listener
