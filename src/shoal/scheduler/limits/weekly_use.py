"""GPU time that users got this week, by the shares that were decided."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from shoal.core.arrays import FloatArray, IntArray
from shoal.core.limits import WEEK_S


class WeeklyUse:
    """GPU-seconds by user since the week began. `begin_s` is the beginning of any one week."""

    def __init__(self, begin_s: float = 0.0) -> None:
        self.begin_s = begin_s
        self.gpu_s: FloatArray = np.zeros(0)
        self._settled_s: float | None = None

    def week_start_s(self, now_s: float) -> float:
        return math.floor((now_s - self.begin_s) / WEEK_S) * WEEK_S + self.begin_s

    def settle(self, now_s: float, gpus: IntArray, user: IntArray, users: int) -> None:
        """Account for the time up to now, in which jobs had these GPUs."""
        if len(self.gpu_s) < users:
            self.gpu_s = np.concatenate([self.gpu_s, np.zeros(users - len(self.gpu_s))])
        before_s, self._settled_s = self._settled_s, now_s
        if before_s is None or now_s <= before_s:
            return
        start_s = self.week_start_s(now_s)
        if before_s < start_s:
            self.gpu_s[:] = 0.0
        had = np.bincount(user, weights=gpus, minlength=len(self.gpu_s))
        self.gpu_s += had * (now_s - max(before_s, start_s))

    def of(self, users: Iterable[int]) -> float:
        """GPU-seconds of these users this week."""
        return float(sum(self.gpu_s[u] for u in users if u < len(self.gpu_s)))

    def state(self) -> dict[str, Any]:
        return {"begin_s": self.begin_s, "settled_s": self._settled_s, "gpu_s": self.gpu_s.tolist()}

    def restore(self, state: Mapping[str, Any], shift_s: float = 0.0) -> None:
        """Continue from a saved state. `shift_s` is the time by which the clock was moved."""
        self.begin_s = state["begin_s"]
        settled_s = state["settled_s"]
        self._settled_s = None if settled_s is None else settled_s + shift_s
        self.gpu_s = np.array(state["gpu_s"], np.float64)
