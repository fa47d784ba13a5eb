"""What the benches share: timing, and one JSON document on stdout."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any, TypeVar

K = TypeVar("K")


def median_ms(call: Callable[[], object], repeat: int = 15) -> float:
    """Median milliseconds of a call, after one to warm up."""
    return statistics.median(_times_ms(call, repeat))


def medians_in_turns_ms(calls: dict[K, Callable[[], object]], turns: int = 7) -> dict[K, float]:
    """The same for several calls in turns, so that a machine that grows slow for a while slows all of them."""
    times: dict[K, list[float]] = {key: [] for key in calls}
    for _ in range(turns):
        for key, call in calls.items():
            times[key] += _times_ms(call, 3)
    return {key: statistics.median(found) for key, found in times.items()}


def _times_ms(call: Callable[[], object], repeat: int) -> list[float]:
    call()
    times = []
    for _ in range(repeat):
        began = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - began))
    return times


def cpu_and_wall(call: Callable[[], Any]) -> tuple[Any, float, float]:
    """(result, CPU seconds, wall seconds)."""
    cpu, wall = time.process_time(), time.perf_counter()
    result = call()
    return result, time.process_time() - cpu, time.perf_counter() - wall


def machine() -> dict[str, Any]:
    return {"cores": os.cpu_count(), "load": os.getloadavg()[0], "python": platform.python_version()}


def print_figures(figures: dict[str, Any]) -> None:
    print(json.dumps({"machine": machine(), **figures}, indent=2))
