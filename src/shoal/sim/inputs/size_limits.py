"""The sizes that each job of a trace may have, by its profile and the GPUs it accepts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl

from shoal.core.cluster import Cluster
from shoal.core.errors import did_you_mean
from shoal.core.profile import ANY_TYPE, Profile
from shoal.sim.inputs.column_values import positions_of, where_in
from shoal.sim.inputs.table import BoolArray, IntArray, Problems, Table


@dataclass(frozen=True)
class Limits:
    """The smallest and largest size of each job, by its model and the GPU types it accepts."""

    smallest: IntArray
    largest: IntArray
    #: The largest share that the profile alone, and the cluster alone, allows.
    in_profile: IntArray
    in_cluster: IntArray
    gpu_types: list[tuple[str, ...]]
    model: pl.Series
    usable: BoolArray
    #: " on v100": the GPU types for which a row's limits hold, if its profile distinguishes types.
    where: Callable[[int], str]

    @classmethod
    def of(
        cls,
        table: Table,
        problems: Problems,
        model: pl.Series,
        profiles: Mapping[str, Profile],
        cluster: Cluster,
        profiles_file: str | Path | None = None,
    ) -> Limits:
        models, model_index = positions_of(model)
        unknown = where_in(model_index, [bool(m) and m not in profiles for m in models])
        problems.add(
            unknown,
            "model",
            lambda row: no_profile(model[row], profiles, profiles_file),
        )
        types, type_index = _gpu_types(table, problems, cluster)
        pair = model_index * len(types) + type_index
        distinct, back = np.unique(pair, return_inverse=True)
        bounds = [
            _bounds(profiles.get(models[p // len(types)]), types[p % len(types)], cluster)
            for p in distinct.tolist()
        ]
        smallest, in_profile, in_cluster, largest = np.array(bounds, np.int64).reshape(-1, 4)[back].T
        usable = largest > 0
        problems.add(
            ~usable & ~unknown,
            "model",
            lambda row: _no_common_type(model[row], profiles, types[type_index[row]] or cluster.gpu_types),
        )
        missing = [
            _missing_types(profiles.get(models[p // len(types)]), types[p % len(types)], cluster)
            for p in distinct.tolist()
        ]
        problems.add(
            usable & np.array([bool(found) for found in missing])[back],
            "model",
            lambda row: _say_missing(model[row], missing[back[row]], types[type_index[row]], cluster),
        )
        return cls(
            np.where(usable, smallest, 1),
            np.where(usable, largest, 1),
            in_profile,
            in_cluster,
            [types[i] for i in type_index.tolist()],
            model,
            usable,
            lambda row: _on_types(profiles[model[row]], types[type_index[row]], cluster),
        )

    def check(self, requested: IntArray, problems: Problems) -> None:
        problems.add(
            self.usable & (requested > self.in_cluster),
            "requested_gpus",
            lambda row: (
                f"{requested[row]} GPUs are more than the cluster has for this job; "
                f"the largest that works is {self.largest[row]}"
            ),
        )
        problems.add(
            self.usable & (requested > self.largest),
            "requested_gpus",
            lambda row: (
                f"{requested[row]} GPUs are beyond the profile of {self.model[row]!r}{self.where(row)}; "
                f"the largest that works is {self.largest[row]}"
            ),
        )
        problems.add(
            self.usable & (requested < self.smallest),
            "requested_gpus",
            lambda row: (
                f"{requested[row]} GPUs are below the profile of {self.model[row]!r}{self.where(row)}; "
                f"the smallest that works is {self.smallest[row]}"
            ),
        )


def no_profile(model: str, known: Iterable[str], file: str | Path | None) -> str:
    """The message about a model without a profile, with the file of the profiles, if known."""
    where = f" in {file}" if file else ""
    return f"no profile for model {model!r}{where}; {did_you_mean(model, known)}"


def _no_common_type(model: str, profiles: Mapping[str, Profile], accepted: tuple[str, ...]) -> str:
    known = ", ".join(profiles[model].gpu_types) if model in profiles else "none"
    return f"{model!r} has a profile for GPUs of type {known}; the job may use {', '.join(accepted)}"


def _on_types(profile: Profile, accepted: tuple[str, ...], cluster: Cluster) -> str:
    if profile.gpu_types == (ANY_TYPE,):
        return ""
    used = [t for t in cluster.gpu_types if (not accepted or t in accepted) and profile.knows(t)]
    return f" on {', '.join(used)}"


def _missing_types(profile: Profile | None, accepted: tuple[str, ...], cluster: Cluster) -> tuple[str, ...]:
    """GPU types of the cluster that the job may use but its profile does not have."""
    if profile is None:
        return ()
    return tuple(t for t in cluster.gpu_types if (not accepted or t in accepted) and not profile.knows(t))


def _say_missing(model: str, missing: tuple[str, ...], accepted: tuple[str, ...], cluster: Cluster) -> str:
    rest = "|".join(t for t in accepted or cluster.gpu_types if t not in missing)
    return (
        f"{model!r} has no profile for GPUs of type {', '.join(missing)}, which the job may use; "
        f"measure it there, or set gpu_types to {rest}"
    )


def _bounds(
    profile: Profile | None, accepted: tuple[str, ...], cluster: Cluster
) -> tuple[int, int, int, int]:
    """Smallest share with a known speed, largest in the profile, largest in the cluster, smaller of the two."""
    if profile is None:
        return 0, 0, 0, 0
    smallest: list[int] = []
    in_profile = in_cluster = both = 0
    for gpu_type, there in zip(cluster.gpu_types, cluster.gpus_of_type.tolist()):
        if (accepted and gpu_type not in accepted) or not profile.knows(gpu_type):
            continue
        curve = profile.curve(gpu_type)
        smallest.append(curve.min_gpus)
        in_profile = max(in_profile, curve.max_gpus)
        in_cluster = max(in_cluster, there)
        both = max(both, min(curve.max_gpus, there))
    return min(smallest, default=0), in_profile, in_cluster, both


def _gpu_types(table: Table, problems: Problems, cluster: Cluster) -> tuple[list[tuple[str, ...]], IntArray]:
    """The distinct lists of accepted types (empty: any), and the index of each job's list."""
    if not table.has("gpu_types"):
        return [()], np.zeros(len(table), np.int64)
    texts, index = positions_of(table.frame["gpu_types"].cast(pl.String).fill_null(""))
    lists = [tuple(part.strip() for part in text.split("|") if part.strip()) for text in texts]
    unknown = [next((t for t in types if t not in cluster.gpu_types), None) for types in lists]
    problems.add(
        where_in(index, [t is not None for t in unknown]),
        "gpu_types",
        lambda row: (
            f"no node has GPUs of type {unknown[index[row]]!r}; "
            f"{did_you_mean(str(unknown[index[row]]), cluster.gpu_types)}"
        ),
    )
    return lists, index
