"""Online estimate of a job's speed on each GPU type, updated as its steps are measured.

One estimator serves one job, or all jobs of one workload, which then learn from each other's measurements.
Its table gives the source of the speed at every share.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.core.profile import Uncertainty
from shoal.knowledge.counts import MOST, is_count
from shoal.knowledge.next_sample import next_sample, variance_gains
from shoal.knowledge.online_speed import OnlineSpeed, Prediction, Source
from shoal.knowledge.speed_fit import SpeedFit
from shoal.knowledge.speed_models import ALL_REDUCE, Floats
from shoal.knowledge.speed_prior import WITHIN, all_reduce_prior
from shoal.knowledge.unknown import Unknown

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class SpeedTable:
    """Speed by share: entry n is for n GPUs packed on the fewest nodes; entry 0 is 0. Arrays are read-only.

    `source` holds `Source` values. If it is UNKNOWN, the speed is NaN and the uncertainty infinite.
    """

    gpu_type: str
    iterations_per_s: Floats
    relative_std: Floats
    source: npt.NDArray[np.uint8]

    def interval(self) -> tuple[Floats, Floats]:
        """The lowest and highest speed of a 90 % interval; 0 and infinity where nothing is known."""
        with np.errstate(over="ignore"):
            factor = np.exp(WITHIN * self.relative_std)
        speed = np.nan_to_num(self.iterations_per_s, nan=0.0)
        return speed / factor, np.where(np.isnan(self.iterations_per_s), np.inf, speed * factor)


class SpeedEstimator:
    """Learns iterations per second by share and GPU type from measured seconds per iteration (all-reduce).

    `batch_size` is the global batch, split over the GPUs; with `max_batch_size` each GPU keeps `batch_size`
    samples until the global batch reaches that limit. `assume` and `memory` are as in `OnlineSpeed`, and the prior is
    that of `speed_prior`. A type with few measurements uses the curve of the best-known type, scaled to its own
    measurements (ASSUMED).
    """

    __slots__ = (
        "_tables",
        "_types",
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
        if not all(is_count(number) for number in (max_gpus, gpus_per_node, memory)):
            raise ValueError(
                f"max_gpus, gpus_per_node and memory must be whole numbers from 1 to {MOST}, "
                f"not {max_gpus}, {gpus_per_node} and {memory}"
            )
        if not all(0 < batch < math.inf for batch in (batch_size, max_batch_size or batch_size)):
            raise ValueError(f"a batch must be a number above 0, not {batch_size} or {max_batch_size}")
        self.max_gpus = max_gpus
        self.gpus_per_node = gpus_per_node
        self.batch_size = batch_size
        self.max_batch_size = max_batch_size
        self.assume = assume
        self.memory = memory
        self._types: dict[str, OnlineSpeed] = {}
        self._tables: dict[str, SpeedTable] = {}

    def observe(self, gpus: int, nodes: int, gpu_type: str, seconds_per_iteration: float) -> Unknown | None:
        """Add one measurement. An invalid one is ignored and the reason returned."""
        if not 1 <= nodes <= gpus <= MOST:
            return Unknown(f"{gpus} GPUs cannot be on {nodes} nodes")
        known = self._types.get(gpu_type)
        if known is None:
            known = OnlineSpeed(
                ALL_REDUCE,
                assume=self.assume,
                memory=self.memory,
                reference=self._every_share(),
                prior=self._prior(),
            )
        refused = known.observe((float(gpus), float(nodes), self._local_batch(gpus)), seconds_per_iteration)
        if refused is None:
            self._types[gpu_type] = known
            self._tables.clear()  # other types may use this type's curve
        return refused

    def gpu_types(self) -> tuple[str, ...]:
        """The GPU types with measurements."""
        return tuple(self._types)

    def table(self, gpu_type: str) -> SpeedTable | Unknown:
        """Iterations per second for 0..max_gpus GPUs of a type, each with its uncertainty and source."""
        table = self._tables.get(gpu_type)
        if table is None:
            predicted = self._predict(gpu_type, self._every_share())
            if isinstance(predicted, Unknown):
                return predicted
            table = SpeedTable(
                gpu_type,
                np.concatenate([[0.0], 1.0 / predicted.seconds]),
                np.concatenate([[0.0], predicted.relative_std]),
                np.concatenate([[np.uint8(Source.MEASURED)], predicted.source]),
            )
            for array in (table.iterations_per_s, table.relative_std, table.source):
                array.setflags(write=False)
            self._tables[gpu_type] = table
        return table

    def seconds(self, gpus: int, nodes: int, gpu_type: str) -> float | Unknown:
        """Seconds per iteration of one placement, packed or spread."""
        if not 1 <= nodes <= gpus <= MOST:
            return Unknown(f"{gpus} GPUs cannot be on {nodes} nodes")
        predicted = self._predict(gpu_type, np.array([[gpus, nodes, self._local_batch(gpus)]], dtype=float))
        if isinstance(predicted, Unknown):
            return predicted
        if predicted.source[0] == Source.UNKNOWN:
            return Unknown(f"too few placements were measured on {gpu_type} to predict others")
        return float(predicted.seconds[0])

    def spread(self, gpu_type: str, nodes: int) -> Floats:
        """Iterations per second for 0..max_gpus GPUs on this many nodes; 0 if impossible or unknown."""
        speed = np.zeros(self.max_gpus + 1)
        if not is_count(nodes, 1, self.max_gpus):
            return speed
        shares = np.arange(nodes, min(self.max_gpus, nodes * self.gpus_per_node) + 1)
        configs = np.array([(g, nodes, self._local_batch(int(g))) for g in shares], np.float64).reshape(-1, 3)
        predicted = self._predict(gpu_type, configs)
        if not isinstance(predicted, Unknown):
            speed[shares] = np.nan_to_num(1.0 / predicted.seconds, nan=0.0)
        return speed

    def next_gpus(self, gpu_type: str, candidates: Sequence[int]) -> int | Unknown:
        """The share of `candidates` whose measurement improves the whole table most."""
        known = self._types.get(gpu_type)
        fit = Unknown(f"nothing was measured on {gpu_type}") if known is None else known.fit()
        if isinstance(fit, Unknown):
            return fit
        every = self._every_share()
        allowed = [n for n in candidates if is_count(n, 1, self.max_gpus)]
        chosen = next_sample(fit, every[[n - 1 for n in allowed]], every)
        return chosen if isinstance(chosen, Unknown) else allowed[chosen.index]

    def fitted(self, gpu_type: str) -> Floats | Unknown:
        """Iterations per second for 0..max_gpus GPUs by the fitted curve, without the measurements that override it."""
        known = self._types.get(gpu_type)
        fit = Unknown(f"nothing was measured on {gpu_type}") if known is None else known.fit()
        if isinstance(fit, Unknown):
            return fit
        return np.concatenate([[0.0], fit.steps_per_s(self._every_share())])

    def samples(self, gpus: int, gpu_type: str) -> int:
        """How often this share was measured since the job's speed last changed."""
        return self._types[gpu_type].samples(gpus) if gpu_type in self._types else 0

    def uncertainty(self, gpu_type: str) -> Uncertainty | Unknown:
        """How well the speed is known for 0..max_gpus GPUs of a type."""
        table, known = self.table(gpu_type), self._types.get(gpu_type)
        if isinstance(table, Unknown) or known is None:
            return Unknown(f"nothing was measured on {gpu_type}")
        fit, every = known.fit(), self._every_share()
        if isinstance(fit, Unknown):
            return fit
        gains, _ = variance_gains(fit, every, every)
        samples = [known.samples(gpus) for gpus in range(self.max_gpus + 1)]
        return Uncertainty(table.relative_std, np.array(samples, np.float64), np.concatenate([[0.0], gains]))

    def to_dict(self) -> dict[str, Any]:
        """The state as plain values."""
        return {
            "max_gpus": self.max_gpus,
            "gpus_per_node": self.gpus_per_node,
            "batch_size": self.batch_size,
            "max_batch_size": self.max_batch_size,
            "assume": self.assume,
            "memory": self.memory,
            "types": {gpu_type: known.to_dict() for gpu_type, known in self._types.items()},
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
        reference = estimator._every_share()
        for gpu_type, saved in state["types"].items():
            estimator._types[gpu_type] = OnlineSpeed.from_dict(saved, reference, estimator._prior())
        return estimator

    def _local_batch(self, gpus: int) -> float:
        if self.max_batch_size is None:
            return self.batch_size / gpus
        return min(self.batch_size, self.max_batch_size / gpus)

    def _prior(self) -> Floats:
        return all_reduce_prior(self._local_batch(1))

    def _every_share(self) -> Floats:
        """Configurations of 1..max_gpus GPUs on the fewest nodes."""
        return np.array(
            [
                (gpus, -(-gpus // self.gpus_per_node), self._local_batch(gpus))
                for gpus in range(1, self.max_gpus + 1)
            ],
            dtype=np.float64,
        )

    def _predict(self, gpu_type: str, configs: Floats) -> Prediction | Unknown:
        known = self._types.get(gpu_type)
        if known is None:
            others = ", ".join(self._types) or "no type"
            return Unknown(f"nothing was measured on {gpu_type} (measured: {others})")
        lender = None if known.is_enough or not self.assume else self._best_known_type()
        if lender is None:
            return known.predict(configs)
        ratio = float(np.median(known.measured_s() / lender.seconds(known.configs())))
        source = np.full(len(configs), Source.ASSUMED, dtype=np.uint8)
        borrowed = Prediction(ratio * lender.seconds(configs), lender.relative_std(configs), source)
        return known.override(configs, borrowed)

    def _best_known_type(self) -> SpeedFit | None:
        fits = [known.fit() for known in self._types.values() if known.is_enough]
        usable = [fit for fit in fits if isinstance(fit, SpeedFit)]
        return max(usable, key=lambda fit: fit.points, default=None)
