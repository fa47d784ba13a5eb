"""Helpers of the benches: timing, and one JSON document on stdout."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any


def median_ms(call: Callable[[], object], repeat: int = 15) -> float:
    """Median milliseconds of a call, after one call to warm up."""
    call()
    times = []
    for _ in range(repeat):
        began = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times)


def cpu_and_wall(call: Callable[[], Any]) -> tuple[Any, float, float]:
    """(result, CPU seconds, wall seconds)."""
    cpu, wall = time.process_time(), time.perf_counter()
    result = call()
    return result, time.process_time() - cpu, time.perf_counter() - wall


def machine() -> dict[str, Any]:
    return {"cores": os.cpu_count(), "load": os.getloadavg()[0], "python": platform.python_version()}


def print_figures(figures: dict[str, Any]) -> None:
    print(json.dumps({"machine": machine(), **figures}, indent=2))
