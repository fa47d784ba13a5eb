"""Progress of simulations: a bar each on a terminal, nothing but the end without one."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from shoal.cli.out import duration, say

FIRST_USE = "first use of a policy here: compiling its kernels, once (5 to 30 seconds)"


class Watch:
    """Bars that show simulated time, jobs done and time left, for runs by name."""

    def __init__(self, runs: Mapping[str, int]) -> None:
        self.runs = runs
        self.began = time.monotonic()
        self._bars: Any = None
        self._tasks: dict[str, Any] = {}
        self._told_of_first_use = False

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

    def tell(self, name: str, now_s: float, done: int) -> None:
        if self._bars:
            self._bars.update(self._tasks[name], completed=done, simulated=duration(now_s))

    def first_use(self) -> None:
        """Say why this takes longer, once for all runs."""
        if not self._told_of_first_use:
            self._told_of_first_use = True
            say(FIRST_USE)

    def of(self, name: str) -> Callable[[float, int, int], bool]:
        """What a simulation calls as it goes."""

        def progress(now_s: float, done: int, total: int) -> bool:
            self.tell(name, now_s, done)
            return True

        return progress
