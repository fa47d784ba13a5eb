"""The models of the jobs of a trace: their speeds, and the assignment of models to jobs that name none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from shoal.core.errors import ShoalError, did_you_mean
from shoal.core.profile import ANY_TYPE, Profile, SpeedCurve
from shoal.sim.inputs.table import FloatArray, IntArray


@dataclass(frozen=True)
class ModelPool:
    """The models that jobs may have, and their speed on the GPU type for which the trace's durations hold."""

    models: tuple[str, ...]
    curves: tuple[SpeedCurve, ...]
    #: The smallest and the largest share of each model on any GPU type.
    smallest: IntArray
    largest: IntArray

    @classmethod
    def of(cls, profiles: Mapping[str, Profile], gpu_type: str | None = None) -> ModelPool:
        """All models with a speed on `gpu_type` (default: that of `common_type`)."""
        if gpu_type is not None:
            named = {t for p in profiles.values() for t in p.gpu_types if t != ANY_TYPE}
            if not named:
                raise ShoalError(
                    f"--gpu-type {gpu_type}: the profiles do not distinguish GPU types; omit the option"
                )
            if gpu_type not in named:
                raise ShoalError(
                    f"--gpu-type {gpu_type}: no profile has a speed on this type; {did_you_mean(gpu_type, named)}"
                )
            profiles = {m: p for m, p in profiles.items() if p.knows(gpu_type)}
        usual = gpu_type or common_type(profiles)
        every = [[by_nodes[0] for by_nodes in p.curves.values()] for p in profiles.values()]
        return cls(
            tuple(profiles),
            tuple(p.curve(usual if p.knows(usual) else p.gpu_types[0]) for p in profiles.values()),
            np.array([min(c.min_gpus for c in curves) for curves in every], np.int64),
            np.array([max(c.max_gpus for c in curves) for curves in every], np.int64),
        )

    def speed(self, model: IntArray, gpus: IntArray) -> FloatArray:
        """Iterations per second of each (model, share); 0 if the profile does not have the share."""
        width = max(c.max_gpus for c in self.curves) + 2  # the last column stands for all that is larger
        table = np.zeros((len(self.curves), width))
        for row, curve in zip(table, self.curves):
            row[: len(curve.speed)] = curve.speed
        return table[model, np.minimum(gpus, width - 1)]

    def runs(self, model: IntArray, gpus: IntArray) -> NDArray[np.bool_]:
        """Whether each (model, share) runs on some GPU type."""
        return (gpus >= self.smallest[model]) & (gpus <= self.largest[model])


def common_type(profiles: Mapping[str, Profile]) -> str:
    """The GPU type of a pool (`--gpus N`), and of the traces made for it.

    It is `gpu` if every profile has speeds for any type. Else it is, among the types that all profiles have, the one
    with the most shares, so that as few jobs as possible are too large for it; ties go to the first.
    """
    known = profiles.values()
    if all(ANY_TYPE in p.curves for p in known):
        return "gpu"
    named = dict.fromkeys(t for p in known for t in p.gpu_types if t != ANY_TYPE)
    shared = [t for t in named if all(p.knows(t) for p in known)]
    return max(shared, key=lambda t: sum(_shares(p.curve(t)) for p in known), default="gpu")


def _shares(curve: SpeedCurve) -> int:
    return curve.max_gpus - curve.min_gpus + 1


def assign_models(requested: IntArray, pool: ModelPool, draw: Callable[[IntArray], IntArray]) -> IntArray:
    """A model for each job, uniform over the models that run at the requested size; -1 if there is none.

    `draw` returns a random integer below each upper bound. With numpy's legacy generator and seed 0
    (`RandomState(0).randint`), one draw per job in the order of the trace, this is the assignment of the
    published AFS results (sim.py of the authors' simulator).
    """
    fits = np.stack([_runs(curve, requested) for curve in pool.curves], axis=1)
    choices = fits.sum(axis=1)
    model = np.full(len(requested), -1, np.int64)
    some = choices > 0
    drawn = draw(choices[some])
    rank = fits[some].cumsum(axis=1)
    model[some] = np.argmax(rank > drawn[:, None], axis=1)
    return model


def _runs(curve: SpeedCurve, requested: IntArray) -> NDArray[np.bool_]:
    return (requested <= curve.max_gpus) & (requested >= curve.min_gpus)


def named_models(jobs: pl.DataFrame, pool: ModelPool) -> IntArray:
    """The models that the trace names, as positions in the pool: `variant` if known, else `model`, else -1."""
    index = {name: i for i, name in enumerate(pool.models)}

    def positions(column: str) -> IntArray:
        found = jobs[column].replace_strict(index, default=-1, return_dtype=pl.Int64)
        return np.asarray(found.to_numpy(), np.int64)

    model = positions("model")
    if "variant" not in jobs.columns:
        return model
    variant = positions("variant")
    return np.where(variant >= 0, variant, model)
