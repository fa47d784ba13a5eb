"""The resources a job needs, learned from finished jobs: Liquid's resource estimation (TPDS'21, section 4).

Each job type has one random forest per label. Features are the job's sizes and command flags (`features`);
labels are the measured resources of its tasks. Only jobs that did not share their GPUs are used for training.
The forests of a type are trained again after every third new example.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shoal.knowledge.counts import is_count
from shoal.knowledge.features import Features, as_number, fnv1a_32
from shoal.knowledge.forest import MIN_SAMPLES_SPLIT, Forest, forest_from_dict, train_forest
from shoal.knowledge.speed_models import Floats
from shoal.knowledge.unknown import Unknown

# Measured per finished task: CPU in percent of a core, utilisation in percent of a GPU.
LABELS = (
    "cpu",
    "cpu_mean",
    "cpu_std",
    "mem_mb",
    "bw_rx_kb_s",
    "bw_tx_kb_s",
    "gpu_util",
    "gpu_util_std",
    "gpu_mem_mb",
)
RETRAIN_EVERY = 3
MIN_EXAMPLES = MIN_SAMPLES_SPLIT  # with fewer, no tree can split
MAX_EXAMPLES = 2000
MOST_FEATURE = 1e15  # beyond this, a forest cannot tell neighbouring integers apart
_ABSENT = -1.0  # value of a flag that a job does not have but others of its type do


@dataclass(frozen=True, slots=True)
class Example:
    """The features and labels of a finished task. Labels are truncated to integers, as in Liquid."""

    features: Features
    labels: dict[str, float]
    exclusive: bool = True


@dataclass(frozen=True, slots=True)
class Needs:
    """The resources to reserve for a task, rounded as in Liquid. `basis` says where the figures come from."""

    cpus: int
    mem_mb: int
    gpu_util: int
    gpu_util_std: float
    gpu_mem_mb: int
    bandwidth: int
    basis: str
    outside: tuple[str, ...] = ()


DEFAULT_NEEDS = Needs(
    cpus=4,
    mem_mb=4096,
    gpu_util=100,
    gpu_util_std=0.0,
    gpu_mem_mb=8192,
    bandwidth=1,
    basis="defaults: nothing is known of such jobs yet",
)


def round_needs(predicted: dict[str, float], basis: str, outside: tuple[str, ...] = ()) -> Needs:
    """CPU ⌈cpu/100⌉; memory up to whole 1024 MB; utilisation down to tens of ⌈v⌉; bandwidth ⌈rx/100000⌉."""
    return Needs(
        cpus=math.ceil(predicted["cpu"] / 100),
        mem_mb=math.ceil(predicted["mem_mb"] / 1024) * 1024,
        gpu_util=math.ceil(predicted["gpu_util"]) // 10 * 10,
        gpu_util_std=predicted["gpu_util_std"],
        gpu_mem_mb=math.ceil(predicted["gpu_mem_mb"] / 1024) * 1024,
        bandwidth=math.ceil(predicted["bw_rx_kb_s"] / 100_000),
        basis=basis,
        outside=outside,
    )


@dataclass(slots=True)
class _Type:
    """One job type: its examples, and the forests trained from the first `trained_on` of them ever seen."""

    examples: list[Example] = field(default_factory=list)
    seen: int = 0
    trained_on: int = 0
    columns: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    ranges: dict[str, tuple[float, float]] = field(default_factory=dict)
    texts: dict[str, list[int]] = field(default_factory=dict)
    forests: dict[str, Forest] = field(default_factory=dict)


class ResourceEstimator:
    """Learns from finished tasks and predicts the needs of new ones, per job type."""

    def __init__(self, *, seed: int = 0, retrain_every: int = RETRAIN_EVERY) -> None:
        self.seed = seed
        self.retrain_every = retrain_every
        self._types: dict[str, _Type] = {}

    def observe(self, job_type: str, example: Example) -> Unknown | None:
        """Add a finished task. One that cannot be used for training is ignored and the reason returned."""
        if not example.exclusive:
            return Unknown("the task shared its GPU, so what it used is not its own need")
        bad = [name for name, value in example.labels.items() if not math.isfinite(value) or value < 0]
        if bad:
            return Unknown(f"measured {', '.join(sorted(bad))} is not a number from 0 up")
        odd = _not_a_feature(example.features)
        if odd is not None:
            return odd
        known = self._types.setdefault(job_type, _Type())
        if known.examples and set(example.labels) != set(known.examples[-1].labels):
            return Unknown(f"examples of {job_type} so far have other labels")
        labels = {name: float(int(value)) for name, value in example.labels.items()}
        known.examples.append(Example(dict(example.features), labels))
        known.seen += 1
        del known.examples[:-MAX_EXAMPLES]
        return None

    def due(self, job_type: str) -> bool:
        """Whether enough examples arrived since the last training."""
        known = self._types.get(job_type)
        return (
            known is not None
            and len(known.examples) >= MIN_EXAMPLES
            and (not known.forests or known.seen - known.trained_on >= self.retrain_every)
        )

    def train(self, job_type: str) -> Unknown | None:
        """Train the forests of a type. Separate from `observe`, so that the caller can postpone it."""
        known = self._types.get(job_type, _Type())
        if len(known.examples) < MIN_EXAMPLES:
            return Unknown(
                f"{len(known.examples)} jobs of type {job_type} finished; {MIN_EXAMPLES} are needed"
            )
        columns = tuple(sorted({name for e in known.examples for name in e.features}))
        samples = np.vstack([_as_row(columns, e.features) for e in known.examples])
        most = max(len(columns) - 1, 1)
        known.forests = {
            label: train_forest(
                samples,
                np.array([e.labels[label] for e in known.examples]),
                seed=self.seed,
                max_features=most,
            )
            for label in known.examples[0].labels
        }
        known.columns = columns
        known.optional = tuple(c for c in columns if any(c not in e.features for e in known.examples))
        known.trained_on = known.seen
        known.texts = {
            c: sorted({fnv1a_32(v) for e in known.examples if isinstance(v := e.features.get(c), str)})
            for c in columns
        }
        known.ranges = {
            c: (float(samples[:, i].min()), float(samples[:, i].max())) for i, c in enumerate(columns)
        }
        return None

    def predict(self, job_type: str, features: Features) -> dict[str, float] | Unknown:
        """The unrounded predictions for every label that the type was trained on."""
        known = self._types.get(job_type)
        if known is None or not known.forests:
            return Unknown(f"no model of job type {job_type} is trained yet")
        row = self._row(known, features)
        if isinstance(row, Unknown):
            return row
        return {label: float(forest.predict(row)[0]) for label, forest in known.forests.items()}

    def needs(self, job_type: str, features: Features) -> Needs | Unknown:
        """The resources to reserve for a task. Callers may use `DEFAULT_NEEDS` if the answer is Unknown."""
        predicted = self.predict(job_type, features)
        if isinstance(predicted, Unknown):
            return predicted
        missing = {"cpu", "mem_mb", "gpu_util", "gpu_util_std", "gpu_mem_mb", "bw_rx_kb_s"} - set(predicted)
        if missing:
            return Unknown(f"jobs of type {job_type} were not measured for {', '.join(sorted(missing))}")
        known = self._types[job_type]
        outside = tuple(
            name
            for name, (low, high) in known.ranges.items()
            if isinstance(value := features.get(name), int) and not low <= value <= high
        )
        return round_needs(predicted, f"{known.trained_on} finished jobs of type {job_type}", outside)

    def speed_by_gpus(self, job_type: str, features: Features, max_gpus: int) -> Floats | Unknown:
        """Jobs per second by number of GPUs (entry 0 is 0), from the predicted total time at each.

        Only for numbers of GPUs within the range of the examples: a forest cannot extrapolate. The result
        is an input of `marginal_utility.right_share`.
        """
        known = self._types.get(job_type)
        if known is None or "total_s" not in known.forests:
            return Unknown(f"no model of the running time of job type {job_type} is trained yet")
        if "num_gpus" not in known.columns:
            return Unknown("the examples do not say how many GPUs they had")
        base = self._row(known, {**features, "num_gpus": 1})
        if isinstance(base, Unknown):
            return base
        if not is_count(max_gpus):
            return Unknown(f"{max_gpus} is not a number of GPUs")
        low, high = known.ranges["num_gpus"]
        if low > 1:
            return Unknown(f"no job of type {job_type} ran on one GPU, so gains cannot be compared")
        rows = np.repeat(base, int(min(max_gpus, high)), axis=0)
        rows[:, known.columns.index("num_gpus")] = np.arange(1, len(rows) + 1)
        total_s = np.maximum(known.forests["total_s"].predict(rows), 1e-9)
        return np.concatenate([[0.0], 1.0 / total_s])

    def to_dict(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "retrain_every": self.retrain_every,
            "types": {name: _type_to_dict(known) for name, known in self._types.items()},
        }

    @classmethod
    def from_dict(cls, state: dict[str, Any]) -> ResourceEstimator | Unknown:
        """An estimator from saved values; Unknown if they are invalid."""
        try:
            estimator = cls(seed=int(state["seed"]), retrain_every=int(state["retrain_every"]))
            for name, saved in state["types"].items():
                known = _type_from_dict(saved)
                if isinstance(known, Unknown):
                    return known
                estimator._types[name] = known
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            return Unknown(f"the saved estimator cannot be read: {type(error).__name__} {error}")
        return estimator

    @staticmethod
    def _row(known: _Type, features: Features) -> Floats | Unknown:
        odd = _not_a_feature(features)
        if odd is not None:
            return odd
        missing = [name for name in known.columns if name not in features and name not in known.optional]
        if missing:
            return Unknown(f"the job does not give {', '.join(missing)}, which earlier jobs of its type gave")
        new = [name for name in features if name not in known.columns]
        if new:
            return Unknown(f"{', '.join(sorted(new))} was never seen in earlier jobs of this type")
        for name in known.columns:
            value = features.get(name)
            if isinstance(value, str) and fnv1a_32(value) not in known.texts[name]:
                return Unknown(f"{name}={value} was never seen in earlier jobs of this type")
        return _as_row(known.columns, features)


def _not_a_feature(features: Features) -> Unknown | None:
    """Features must be text, or numbers that a forest can compare."""
    odd = [n for n, v in features.items() if not isinstance(v, str) and not abs(v) < MOST_FEATURE]
    return Unknown(f"the feature {', '.join(sorted(odd))} is not a valid number") if odd else None


def _as_row(columns: tuple[str, ...], features: Features) -> Floats:
    return np.array([[as_number(features[c]) if c in features else _ABSENT for c in columns]])


def _type_to_dict(known: _Type) -> dict[str, Any]:
    return {
        "examples": [[dict(e.features), dict(e.labels)] for e in known.examples],
        "seen": known.seen,
        "trained_on": known.trained_on,
        "columns": list(known.columns),
        "optional": list(known.optional),
        "ranges": {name: list(bounds) for name, bounds in known.ranges.items()},
        "texts": {name: list(hashes) for name, hashes in known.texts.items()},
        "forests": {label: forest.to_dict() for label, forest in known.forests.items()},
    }


def _type_from_dict(saved: dict[str, Any]) -> _Type | Unknown:
    forests: dict[str, Forest] = {}
    columns = tuple(saved["columns"])
    for label, state in saved["forests"].items():
        forest = forest_from_dict(state)
        if isinstance(forest, Unknown):
            return forest
        if forest.features != len(columns):
            return Unknown(f"the saved forest of {label} has {forest.features} features, not {len(columns)}")
        forests[label] = forest
    return _Type(
        examples=[Example(features, labels) for features, labels in saved["examples"]],
        seen=int(saved["seen"]),
        trained_on=int(saved["trained_on"]),
        columns=columns,
        optional=tuple(saved["optional"]),
        ranges={name: (float(low), float(high)) for name, (low, high) in saved["ranges"].items()},
        texts={name: [int(value) for value in hashes] for name, hashes in saved["texts"].items()},
        forests=forests,
    )
