"""Measure the compilation of kernels, which happens on first use and is cached on disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from numba.core.event import TimingListener, install_listener


class Compiling(TimingListener):  # type: ignore[misc, unused-ignore]
    """Listens to numba's compilation of kernels; loading cached kernels takes almost no time."""

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
    """Call `begins` when the first kernel in this context is compiled, and sum up the seconds of all."""
    with install_listener("numba:compile", Compiling(begins)) as heard:
        yield heard
