"""Progress of simulations: a bar each on a terminal, and nothing without one."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from shoal.cli.out import duration, say

FIRST_USE = "first use of a policy here: compiling its kernels, once (5 to 30 seconds)"


class Watch:
    """Progress bars of runs: simulated time, finished jobs and time left."""

    def __init__(self, runs: Mapping[str, int]) -> None:
        self.runs = runs
        self.began = time.monotonic()
        self._bars: Any = None
        self._tasks: dict[str, Any] = {}
        self._first_use_shown = False

    def __enter__(self) -> Watch:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            self._bars = Progress(
                TextColumn("{task.description:<12}"),
                BarColumn(),
                TextColumn("{task.completed:>7,.0f} of {task.total:,.0f} jobs"),
                TextColumn("simulated {task.fields[simulated]}"),
                TimeRemainingColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._bars.start()
            for name, total in self.runs.items():
                self._tasks[name] = self._bars.add_task(name, total=total, simulated="0s")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        if self._bars:
            self._bars.stop()

    def show(self, name: str, now_s: float, done: int) -> None:
        if self._bars:
            self._bars.update(self._tasks[name], completed=done, simulated=duration(now_s))

    def first_use(self) -> None:
        """Print why this takes longer, once for all runs."""
        if not self._first_use_shown:
            self._first_use_shown = True
            say(FIRST_USE)

    def of(self, name: str) -> Callable[[float, int, int], bool]:
        """The callback with which a simulation reports its progress."""

        def progress(now_s: float, done: int, total: int) -> bool:
            self.show(name, now_s, done)
            return True

        return progress
