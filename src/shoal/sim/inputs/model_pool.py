"""The models that jobs of a trace may have: how fast each is, and which one a job gets that names none."""

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
    """The models jobs may have, and their speed on the GPU type on which the trace's durations count."""

    models: tuple[str, ...]
    curves: tuple[SpeedCurve, ...]
    #: The smallest and the largest share of each model on any GPU type.
    smallest: IntArray
    largest: IntArray

    @classmethod
    def of(cls, profiles: Mapping[str, Profile], gpu_type: str | None = None) -> ModelPool:
        """All models of the profiles that know `gpu_type` (default: the one of `common_type`)."""
        if gpu_type is not None:
            named = {t for p in profiles.values() for t in p.gpu_types if t != ANY_TYPE}
            if not named:
                raise ShoalError(
                    f"--gpu-type {gpu_type}: the profiles do not tell GPU types apart; leave it out"
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
        """Iterations per second of each (model, share); 0 where the profile does not know the share."""
        width = max(c.max_gpus for c in self.curves) + 2  # the last column stands for all that is larger
        table = np.zeros((len(self.curves), width))
        for row, curve in zip(table, self.curves):
            row[: len(curve.speed)] = curve.speed
        return table[model, np.minimum(gpus, width - 1)]

    def runs(self, model: IntArray, gpus: IntArray) -> NDArray[np.bool_]:
        """Whether each (model, share) runs on some GPU type."""
        return (gpus >= self.smallest[model]) & (gpus <= self.largest[model])


def common_type(profiles: Mapping[str, Profile]) -> str:
    """The GPU type of a cluster that nobody described, and of the traces made for it.

    `gpu` where every profile has speeds for any type; else, of the types that all of them know, the one on which
    they have the most shares, so that as few jobs as possible are too large for it; of several the first.
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
    """A model for each job, uniform over those of the pool that run at the requested size; -1 for none.

    `draw` gives for each upper bound a random whole number below it. With numpy's legacy generator and
    seed 0 (`RandomState(0).randint`), one draw per job in the order of the trace, this is the very
    assignment behind the published AFS results (sim.py of the authors' simulator).
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
    """The models the trace names, as positions in the pool: `variant` before `model`; -1 for unknown ones."""
    index = {name: i for i, name in enumerate(pool.models)}

    def positions(column: str) -> IntArray:
        found = jobs[column].replace_strict(index, default=-1, return_dtype=pl.Int64)
        return np.asarray(found.to_numpy(), np.int64)

    model = positions("model")
    if "variant" not in jobs.columns:
        return model
    variant = positions("variant")
    return np.where(variant >= 0, variant, model)
