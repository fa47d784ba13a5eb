"""Kernels are compiled when they are first used, once on a machine: when that begins, and how long it takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from numba.core.event import TimingListener, install_listener


class Compiling(TimingListener):  # type: ignore[misc, unused-ignore]
    """Hears of every kernel that numba compiles; those it finds on disk cost next to nothing."""

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
    """Call `begins` when the first kernel is compiled within this context, and count the seconds of all."""
    with install_listener("numba:compile", Compiling(begins)) as heard:
        yield heard
