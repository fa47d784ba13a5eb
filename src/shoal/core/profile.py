"""The speed of a job: iterations per second by share, GPU type and number of nodes.

Between measured points the time per iteration is interpolated linearly, as in the published AFS results.
This makes the speed convex inside a segment. Interpolating the speed instead is an option.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np

from shoal.core.arrays import FloatArray
from shoal.core.errors import ShoalError, did_you_mean

Interpolation = Literal["time", "throughput"]

#: The key of a curve that is valid for every GPU type.
ANY_TYPE = "*"


#: Shortest time per iteration. Below it the speed would overflow.
_LEAST_S = 1e-300


@dataclass(frozen=True, eq=False)
class SpeedCurve:
    """Iterations per second with 0, 1, 2, ... GPUs; 0 for a share that cannot run."""

    speed: FloatArray

    @property
    def max_gpus(self) -> int:
        return len(self.speed) - 1

    @property
    def min_gpus(self) -> int:
        """The smallest share with a known speed."""
        return int(np.argmax(self.speed > 0))

    @classmethod
    def from_points(cls, points: Mapping[int, float], interpolation: Interpolation = "time") -> SpeedCurve:
        """A curve through measured `{gpus: seconds_per_iteration}`."""
        if not points:
            raise ShoalError("a speed curve needs at least one measured point")
        gpus = np.array(sorted(points), np.float64)
        seconds = np.array([points[int(g)] for g in gpus], np.float64)
        if gpus[0] < 1 or not (np.isfinite(seconds).all() and (seconds > _LEAST_S).all()):
            raise ShoalError("seconds per iteration must be positive, finite, and for 1 GPU or more")
        shares = np.arange(int(gpus[0]), int(gpus[-1]) + 1)
        speed = np.zeros(int(gpus[-1]) + 1)
        if interpolation == "time":
            speed[shares] = 1.0 / np.interp(shares, gpus, seconds)
        else:
            speed[shares] = np.interp(shares, gpus, 1.0 / seconds)
        return cls(speed)


@dataclass(frozen=True, eq=False)
class Uncertainty:
    """How well a curve is known, by share (entry 0 is for no GPUs). Policies may use it."""

    #: Relative standard deviation of the true speed.
    relative_std: FloatArray
    #: How often this share was measured; 0 if its speed is only predicted.
    samples: FloatArray
    #: By how much one measurement at this share lowers the summed variance of the curve (`knowledge.next_sample`).
    variance_removed: FloatArray


@dataclass(frozen=True, eq=False)
class Profile:
    """Speed curves of one kind of job: by GPU type, and within a type by the number of nodes.

    Decisions use the curve for 0 nodes: each share packed on the fewest nodes that were measured for it.
    `speed(...)` returns the speed on a number of nodes.
    """

    model: str
    #: {gpu_type or ANY_TYPE: {nodes or 0: curve}}
    curves: Mapping[str, Mapping[int, SpeedCurve]]
    #: For parameter-server jobs: iterations per second by [servers - 1, workers - 1]. `curves` then assumes as
    #: many servers as workers, because that is what policies that only count GPUs give them.
    by_servers: FloatArray | None = None
    #: By GPU type: how well the curve is known. Types that were not measured are missing, and all of them if the
    #: profile is the truth.
    uncertain: Mapping[str, Uncertainty] = field(default_factory=dict)

    @classmethod
    def of(cls, model: str, points: Mapping[int, float], interpolation: Interpolation = "time") -> Profile:
        """A profile for every GPU type that does not depend on the placement."""
        return cls(model, {ANY_TYPE: {0: SpeedCurve.from_points(points, interpolation)}})

    @classmethod
    def from_rows(
        cls,
        model: str,
        rows: Iterable[tuple[str, int, int, float]],
        interpolation: Interpolation = "time",
    ) -> Profile:
        """From rows (gpu_type or "*", gpus, nodes or 0, seconds_per_iteration)."""
        by_type: dict[str, dict[int, dict[int, float]]] = {}
        for gpu_type, gpus, nodes, seconds in rows:
            by_type.setdefault(gpu_type, {}).setdefault(nodes, {})[gpus] = seconds
        curves: dict[str, dict[int, SpeedCurve]] = {}
        for gpu_type, by_nodes in by_type.items():
            packed = dict(by_nodes.get(0, {}))
            for nodes in sorted(n for n in by_nodes if n > 0):
                for gpus, seconds in by_nodes[nodes].items():
                    packed.setdefault(gpus, seconds)
            curves[gpu_type] = {0: SpeedCurve.from_points(packed, interpolation)}
            for nodes, points in by_nodes.items():
                if nodes > 0:
                    curves[gpu_type][nodes] = SpeedCurve.from_points(points, interpolation)
        return cls(model, curves)

    @classmethod
    def of_servers(cls, model: str, by_servers: FloatArray) -> Profile:
        """A profile of a parameter-server job from its speed by [servers - 1, workers - 1]."""
        even = min(by_servers.shape)
        curve = SpeedCurve(np.concatenate([[0.0], np.diagonal(by_servers)[:even]]))
        return cls(model, {ANY_TYPE: {0: curve}}, np.ascontiguousarray(by_servers, np.float64))

    @property
    def gpu_types(self) -> tuple[str, ...]:
        return tuple(self.curves)

    @cached_property
    def tells_nodes(self) -> bool:
        """Whether the speed depends on the number of nodes."""
        return any(nodes > 0 for by_nodes in self.curves.values() for nodes in by_nodes)

    def knows(self, gpu_type: str) -> bool:
        return gpu_type in self.curves or ANY_TYPE in self.curves

    def curve(self, gpu_type: str) -> SpeedCurve:
        """The curve for decisions on this GPU type."""
        by_nodes = self.curves.get(gpu_type) or self.curves.get(ANY_TYPE)
        if by_nodes is None:
            raise ShoalError(
                f"the profile of {self.model!r} has no speed on {gpu_type!r}; "
                f"{did_you_mean(gpu_type, self.curves)}"
            )
        return by_nodes[0]

    def speeds_on(self, gpu_type: str) -> FloatArray:
        """The same curve, padded with 0 to the length of the longest curve of any type."""
        own = self.curve(gpu_type).speed
        longest = max(len(by_nodes[0].speed) for by_nodes in self.curves.values())
        return np.concatenate([own, np.zeros(longest - len(own))])

    def speed(self, gpu_type: str, gpus: int, nodes: int = 0) -> float:
        """Iterations per second with `gpus` GPUs on `nodes` nodes (0: packed).

        If this number of nodes was not measured for the share, use the next smaller number that was
        measured, or else the packed curve.
        """
        by_nodes = self.curves.get(gpu_type) or self.curves.get(ANY_TYPE) or {}
        for measured in sorted((n for n in by_nodes if 0 < n <= nodes), reverse=True):
            table = by_nodes[measured].speed
            if gpus < len(table) and table[gpus] > 0:
                return float(table[gpus])
        packed = by_nodes[0].speed if by_nodes else np.zeros(1)
        return float(packed[gpus]) if gpus < len(packed) else 0.0
