"""What is known of one job's speed, kept up to date as its steps are measured.

One estimator serves one job, or all jobs of one workload: then they learn from each other's measurements.
The table it gives says of every share where the figure comes from. A measured point overrides the fit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.knowledge.next_sample import next_sample
from shoal.knowledge.speed import SpeedFit, fit_speed
from shoal.knowledge.speed_models import ALL_REDUCE, Floats
from shoal.knowledge.unknown import Unknown


class Source(IntEnum):
    """Where a figure of the table comes from, weakest first."""

    UNKNOWN = 0
    ASSUMED = 1  # fewer configurations measured than the model has terms, or another GPU type's curve
    FITTED = 2
    MEASURED = 3


@dataclass(frozen=True, slots=True, eq=False)
class SpeedTable:
    """Speed by share: entry n is for n GPUs packed on the fewest nodes; entry 0 is 0."""

    gpu_type: str
    iterations_per_s: Floats
    relative_std: Floats
    source: npt.NDArray[np.uint8]


@dataclass(slots=True)
class _Measured:
    """Running mean and variance of seconds per iteration; old measurements fade after `memory` new ones."""

    count: int
    mean_s: float
    variance_s2: float

    def add(self, seconds: float, memory: int) -> None:
        self.count += 1
        step = max(1.0 / self.count, 1.0 / memory)
        difference = seconds - self.mean_s
        self.mean_s += step * difference
        self.variance_s2 = (1.0 - step) * (self.variance_s2 + step * difference * difference)


class SpeedEstimator:
    """Learns iterations per second by share and GPU type from measured seconds per iteration.

    `batch_size` is the global batch, split over the GPUs; with `max_batch_size` each GPU keeps `batch_size`
    samples until the global batch reaches that limit. Below as many distinct configurations as the model has
    terms, other shares are ASSUMED (`assume=True`: the model's usual split of a step, scaled to what was
    measured) or UNKNOWN (NaN).
    """

    __slots__ = (
        "_cache",
        "_measured",
        "assume",
        "batch_size",
        "gpus_per_node",
        "max_batch_size",
        "max_gpus",
        "memory",
    )

    def __init__(
        self,
        max_gpus: int,
        gpus_per_node: int,
        *,
        batch_size: float = 1.0,
        max_batch_size: float | None = None,
        assume: bool = True,
        memory: int = 20,
    ) -> None:
        if max_gpus < 1 or gpus_per_node < 1 or batch_size <= 0 or memory < 1:
            raise ValueError("max_gpus, gpus_per_node and memory must be at least 1 and batch_size above 0")
        self.max_gpus = max_gpus
        self.gpus_per_node = gpus_per_node
        self.batch_size = batch_size
        self.max_batch_size = max_batch_size
        self.assume = assume
        self.memory = memory
        self._measured: dict[str, dict[tuple[int, int], _Measured]] = {}
        self._cache: dict[str, SpeedFit | Unknown] = {}

    def observe(self, gpus: int, nodes: int, gpu_type: str, seconds_per_iteration: float) -> Unknown | None:
        """Take in one measurement. A measurement that cannot be is left out, and the answer says why."""
        if gpus < 1 or nodes < 1 or nodes > gpus:
            return Unknown(f"{gpus} GPUs cannot be on {nodes} nodes")
        if not (math.isfinite(seconds_per_iteration) and seconds_per_iteration > 0):
            return Unknown(f"an iteration cannot take {seconds_per_iteration} s")
        points = self._measured.setdefault(gpu_type, {})
        point = points.get((gpus, nodes))
        if point is None:
            points[gpus, nodes] = _Measured(1, seconds_per_iteration, 0.0)
        else:
            point.add(seconds_per_iteration, self.memory)
        self._cache.clear()  # other types may lean on this one's curve
        return None

    def gpu_types(self) -> tuple[str, ...]:
        """The GPU types that something was measured on."""
        return tuple(self._measured)

    def fit(self, gpu_type: str) -> SpeedFit | Unknown:
        """The fitted curve of one GPU type from its own measurements only."""
        cached = self._cache.get(gpu_type)
        if cached is None:
            cached = self._fit(gpu_type)
            self._cache[gpu_type] = cached
        return cached

    def seconds(self, gpus: int, nodes: int, gpu_type: str) -> float | Unknown:
        """Seconds per iteration of one placement: measured if it was, else from the curve."""
        point = self._measured.get(gpu_type, {}).get((gpus, nodes))
        if point is not None:
            return point.mean_s
        found = self._curve(gpu_type)
        if isinstance(found, Unknown):
            return found
        fit, ratio, _ = found
        return float(fit.seconds(self._configs(np.array([gpus]), np.array([nodes])))[0] * ratio)

    def table(self, gpu_type: str) -> SpeedTable | Unknown:
        """Iterations per second for 0..max_gpus GPUs of a type, with uncertainty and source of each."""
        points = self._measured.get(gpu_type)
        if not points:
            known = ", ".join(self._measured) or "no type"
            return Unknown(f"nothing was measured on {gpu_type} (measured: {known})")
        shares = np.arange(1, self.max_gpus + 1)
        nodes = self._packed(shares)
        speed = np.full(self.max_gpus + 1, np.nan)
        spread = np.full(self.max_gpus + 1, np.inf)
        source = np.zeros(self.max_gpus + 1, dtype=np.uint8)
        found = self._curve(gpu_type)
        if not isinstance(found, Unknown):
            fit, ratio, kind = found
            configs = self._configs(shares, nodes)
            speed[1:] = 1.0 / (ratio * fit.seconds(configs))
            spread[1:] = fit.relative_std(configs)
            source[1:] = kind
        for (gpus, on_nodes), point in points.items():
            if gpus <= self.max_gpus and on_nodes == nodes[gpus - 1]:
                speed[gpus] = 1.0 / point.mean_s
                spread[gpus] = _spread_of_mean(point)
                source[gpus] = Source.MEASURED
        speed[0], spread[0], source[0] = 0.0, 0.0, Source.MEASURED
        return SpeedTable(gpu_type, speed, spread, source)

    def next_gpus(self, gpu_type: str, candidates: Sequence[int]) -> int | Unknown:
        """Which share of `candidates` to measure next, for the sake of the whole table."""
        found = self._curve(gpu_type)
        if isinstance(found, Unknown):
            return found
        allowed = np.array([n for n in candidates if 1 <= n <= self.max_gpus], dtype=np.int64)
        shares = np.arange(1, self.max_gpus + 1)
        chosen = next_sample(
            found[0],
            self._configs(allowed, self._packed(allowed)),
            self._configs(shares, self._packed(shares)),
        )
        return chosen if isinstance(chosen, Unknown) else int(allowed[chosen.index])

    def to_dict(self) -> dict[str, Any]:
        """All that is needed to go on later, as plain values."""
        return {
            "max_gpus": self.max_gpus,
            "gpus_per_node": self.gpus_per_node,
            "batch_size": self.batch_size,
            "max_batch_size": self.max_batch_size,
            "assume": self.assume,
            "memory": self.memory,
            "measured": [
                [gpu_type, gpus, nodes, point.count, point.mean_s, point.variance_s2]
                for gpu_type, points in self._measured.items()
                for (gpus, nodes), point in points.items()
            ],
        }

    @classmethod
    def from_dict(cls, state: dict[str, Any]) -> SpeedEstimator:
        estimator = cls(
            state["max_gpus"],
            state["gpus_per_node"],
            batch_size=state["batch_size"],
            max_batch_size=state["max_batch_size"],
            assume=state["assume"],
            memory=state["memory"],
        )
        for gpu_type, gpus, nodes, count, mean_s, variance_s2 in state["measured"]:
            points = estimator._measured.setdefault(gpu_type, {})
            points[gpus, nodes] = _Measured(count, mean_s, variance_s2)
        return estimator

    def _packed(self, shares: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return -(-shares // self.gpus_per_node)

    def _configs(self, gpus: npt.NDArray[np.int64], nodes: npt.NDArray[np.int64]) -> Floats:
        local = self.batch_size / gpus
        if self.max_batch_size is not None:
            local = np.minimum(self.batch_size, self.max_batch_size / gpus)
        return np.stack([gpus, nodes, local], axis=1).astype(np.float64)

    def _fit(self, gpu_type: str) -> SpeedFit | Unknown:
        points = self._measured.get(gpu_type, {})
        if not points:
            return Unknown(f"nothing was measured on {gpu_type}")
        placed = np.array(list(points), dtype=np.int64)
        seconds = np.array([point.mean_s for point in points.values()])
        shares = np.arange(1, self.max_gpus + 1)
        return fit_speed(
            ALL_REDUCE,
            self._configs(placed[:, 0], placed[:, 1]),
            seconds,
            min_points=1 if self.assume else len(ALL_REDUCE.terms),
            reference=self._configs(shares, self._packed(shares)),
        )

    def _curve(self, gpu_type: str) -> tuple[SpeedFit, float, Source] | Unknown:
        """The best curve for a type, a factor on its seconds, and how far to trust it."""
        own = self.fit(gpu_type)
        enough = len(ALL_REDUCE.terms)
        if not isinstance(own, Unknown) and own.points >= enough:
            return own, 1.0, Source.FITTED
        points = self._measured.get(gpu_type, {})
        lender = self._best_known_type(gpu_type)
        if points and lender is not None and self.assume:
            ratios = [
                point.mean_s / float(lender.seconds(self._configs(np.array([gpus]), np.array([nodes])))[0])
                for (gpus, nodes), point in points.items()
            ]
            return lender, float(np.median(ratios)), Source.ASSUMED
        return own if isinstance(own, Unknown) else (own, 1.0, Source.ASSUMED)

    def _best_known_type(self, but: str) -> SpeedFit | None:
        fits = [self.fit(gpu_type) for gpu_type in self._measured if gpu_type != but]
        full = [fit for fit in fits if isinstance(fit, SpeedFit) and fit.points >= len(ALL_REDUCE.terms)]
        return max(full, key=lambda fit: fit.points, default=None)


def _spread_of_mean(point: _Measured) -> float:
    """Relative standard deviation of a measured mean; a single measurement is taken as 5 % uncertain."""
    if point.count < 2:
        return 0.05
    return max(math.sqrt(point.variance_s2 / (point.count - 1)) / point.mean_s, 0.001)
