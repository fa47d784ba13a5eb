"""Online speed measurements of one kind of job, the model fitted to them, and its predictions.

A measured configuration overrides the fit, unless the job's speed has changed since. With fewer distinct
configurations than the model has terms, the fit depends on what is assumed of a step's time: such predictions are
ASSUMED, not FITTED.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.knowledge.speed_fit import SpeedFit, fit_speed, is_config, is_duration
from shoal.knowledge.speed_models import MODELS, Floats, SpeedModel
from shoal.knowledge.unknown import Unknown

Config = tuple[float, float, float]


DRIFT = 0.25
"""A measurement that differs by more than this part from what was measured before at its size ..."""
DRIFT_AFTER = 3
"""... so many times in a row, to the same side, means that the job's speed has changed."""
STALE_STD = 0.2
"""Relative uncertainty of sizes that were measured before the speed changed."""


class Source(IntEnum):
    """The source of a prediction, weakest first."""

    UNKNOWN = 0
    ASSUMED = 1
    FITTED = 2
    MEASURED = 3


@dataclass(frozen=True, slots=True, eq=False)
class Prediction:
    """Seconds per step of each configuration, their relative uncertainty, and their source."""

    seconds: Floats
    relative_std: Floats
    source: npt.NDArray[np.uint8]


@dataclass(slots=True)
class _Measured:
    """Running mean and variance of seconds per step; the last `memory` measurements count most."""

    count: int
    mean_s: float
    variance_s2: float
    #: Measured before the job's speed changed, and scaled by that change.
    is_stale: bool = False
    #: The last measurements in a row that differ by more than `DRIFT`.
    away_s: list[float] = field(default_factory=list)

    def drifts(self, seconds: float) -> bool:
        """Whether this measurement differs from those before. One that does is not added."""
        if self.count < DRIFT_AFTER or abs(seconds / self.mean_s - 1.0) <= DRIFT:
            self.away_s.clear()
            return False
        if self.away_s and (self.away_s[-1] > self.mean_s) != (seconds > self.mean_s):
            self.away_s.clear()
        self.away_s.append(seconds)
        return True

    def add(self, seconds: float, memory: int) -> None:
        self.count += 1
        part = max(1.0 / self.count, 1.0 / memory)
        difference = seconds - self.mean_s
        self.mean_s += part * difference
        self.variance_s2 = (1.0 - part) * (self.variance_s2 + part * difference * difference)

    def spread(self) -> float:
        """Relative standard deviation of the mean; 5 % for a single measurement."""
        if self.count < 2:
            return 0.05
        return max(math.sqrt(self.variance_s2 / (self.count - 1)) / self.mean_s, 0.001)


class OnlineSpeed:
    """Learns the seconds per step of configurations (see the model's `columns`) from measurements.

    Old measurements of a configuration lose weight after `memory` new ones. With `assume=False` there are no
    predictions before there are enough configurations. `reference` configurations give the scale of terms
    that no measured configuration contains. `prior` is as in `fit_speed`.

    If a job's speed changes (`DRIFT`), the other sizes are scaled by the same factor and are estimates again.
    """

    __slots__ = ("_fit", "_measured", "assume", "memory", "model", "prior", "reference")

    def __init__(
        self,
        model: SpeedModel,
        *,
        assume: bool = True,
        memory: int = 20,
        reference: Floats | None = None,
        prior: Floats | None = None,
    ) -> None:
        if memory < 1:
            raise ValueError("memory must be at least 1 measurement")
        self.model = model
        self.assume = assume
        self.memory = memory
        self.reference = reference
        self.prior = prior
        self._measured: dict[Config, _Measured] = {}
        self._fit: SpeedFit | Unknown | None = None

    def observe(self, config: Config, seconds: float) -> Unknown | None:
        """Add one measurement. An invalid one is ignored and the reason returned."""
        columns = self.model.columns
        if len(config) != len(columns):
            return Unknown(
                f"a configuration has {len(columns)} numbers ({', '.join(columns)}), not {len(config)}"
            )
        if not is_config(np.array([config], np.float64))[0]:
            named = ", ".join(f"{value:g} {name}" for name, value in zip(columns, config))
            return Unknown(f"there is no configuration of {named}")
        if not is_duration(np.array(seconds)):
            return Unknown(f"a step cannot take {seconds} s")
        point = self._measured.get(config)
        if point is None or point.is_stale:
            self._measured[config] = _Measured(1, seconds, 0.0)
        elif not point.drifts(seconds):
            point.add(seconds, self.memory)
        elif len(point.away_s) >= DRIFT_AFTER:
            self._drifted(config, point)
        self._fit = None
        return None

    def _drifted(self, config: Config, point: _Measured) -> None:
        """The speed has changed: assume by the same factor at the other sizes, until they are measured again."""
        seconds = float(np.median(point.away_s))
        factor = seconds / point.mean_s
        for other in self._measured.values():
            other.mean_s *= factor
            other.variance_s2 *= factor**2
            other.is_stale = True
            other.away_s.clear()
        self._measured[config] = _Measured(1, seconds, 0.0)

    def configs(self) -> Floats:
        """The measured configurations, one per row."""
        return np.array(list(self._measured), dtype=np.float64).reshape(-1, len(self.model.columns))

    def measured_s(self) -> Floats:
        """The mean measured seconds of each configuration."""
        return np.array([point.mean_s for point in self._measured.values()])

    def samples(self, gpus: int) -> int:
        """How often configurations with so many GPUs were measured since the speed last changed."""
        return sum(p.count for c, p in self._measured.items() if c[0] == gpus and not p.is_stale)

    @property
    def is_enough(self) -> bool:
        return len(self._measured) >= len(self.model.terms)

    def fit(self) -> SpeedFit | Unknown:
        """The model fitted to the measurements so far."""
        if self._fit is None:
            least = 1 if self.assume else len(self.model.terms)
            self._fit = fit_speed(
                self.model,
                self.configs(),
                self.measured_s(),
                min_points=least,
                reference=self.reference,
                prior=self.prior,
            )
        return self._fit

    def predict(self, configs: Floats) -> Prediction:
        """Seconds of each configuration; NaN if unknown."""
        fit = self.fit()
        if isinstance(fit, Unknown):
            return self.override(configs, nothing_known(len(configs)))
        kind = Source.FITTED if self.is_enough else Source.ASSUMED
        source = np.full(len(configs), kind, dtype=np.uint8)
        return self.override(configs, Prediction(fit.seconds(configs), fit.relative_std(configs), source))

    def override(self, configs: Floats, predicted: Prediction) -> Prediction:
        """Replace predictions by measurements where there are any."""
        where = {config: row for row, config in enumerate(map(tuple, configs.tolist()))}
        for config, point in self._measured.items():
            row = where.get(config)
            if row is not None:
                predicted.seconds[row] = point.mean_s
                predicted.relative_std[row] = STALE_STD if point.is_stale else point.spread()
                predicted.source[row] = Source.ASSUMED if point.is_stale else Source.MEASURED
        return predicted

    def to_dict(self) -> dict[str, Any]:
        """The model's name and the measurements, as plain values."""
        return {
            "model": self.model.name,
            "assume": self.assume,
            "memory": self.memory,
            "measured": [
                [*config, point.count, point.mean_s, point.variance_s2, int(point.is_stale)]
                for config, point in self._measured.items()
            ],
        }

    @classmethod
    def from_dict(
        cls, state: dict[str, Any], reference: Floats | None = None, prior: Floats | None = None
    ) -> OnlineSpeed:
        known = cls(
            MODELS[state["model"]],
            assume=state["assume"],
            memory=state["memory"],
            reference=reference,
            prior=prior,
        )
        for first, second, third, count, mean_s, variance_s2, *stale in state["measured"]:
            known._measured[first, second, third] = _Measured(count, mean_s, variance_s2, any(stale))
        return known


def nothing_known(count: int) -> Prediction:
    return Prediction(np.full(count, np.nan), np.full(count, np.inf), np.zeros(count, dtype=np.uint8))


def server_worker_table(known: OnlineSpeed, max_servers: int, max_workers: int, batch: float) -> Floats:
    """Steps per second by (servers, workers) for a parameter-server model; row and column 0 are 0."""
    servers, workers = np.meshgrid(
        np.arange(1, max_servers + 1), np.arange(1, max_workers + 1), indexing="ij"
    )
    configs = np.stack([servers.ravel(), workers.ravel(), np.full(servers.size, batch)], axis=1)
    table = np.zeros((max_servers + 1, max_workers + 1))
    table[1:, 1:] = 1.0 / known.predict(configs).seconds.reshape(servers.shape)
    return table
