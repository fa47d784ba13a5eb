"""Profiles from measured placements: the speed of a job by its GPUs and the number of nodes it spans.

The published measurements (Pollux, OSDI'21) write a placement as digits, the GPUs on each node: "4" is one
node, "22" is two. Each placement has the seconds per step for several batch sizes per GPU. With a fixed
global batch, each share has its own batch size per GPU, so the step time is interpolated between the
measured batch sizes. Above the largest one, gradients are accumulated over several steps. Below the smallest
one nothing is known, and the share is omitted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import numpy as np

from shoal.core.errors import ShoalError
from shoal.core.profile import ANY_TYPE, Profile


def profile_from_placements(
    model: str,
    measured: Iterable[tuple[str, float, float]],
    global_batch: float,
    gpu_type: str = ANY_TYPE,
) -> Profile:
    """A profile from rows (placement, batch per GPU, seconds per step), for one global batch per iteration."""
    rows = iteration_times(model, measured, global_batch)
    return Profile.from_rows(model, [(gpu_type, gpus, nodes, seconds) for gpus, nodes, seconds in rows])


def iteration_times(
    model: str, measured: Iterable[tuple[str, float, float]], global_batch: float
) -> list[tuple[int, int, float]]:
    """(GPUs, nodes, seconds per iteration): the columns of profiles.csv, for one global batch per iteration.

    Placements with the same number of GPUs and nodes ("31" and "22") are averaged.
    """
    if not 0 < global_batch < np.inf:
        raise ShoalError(f"the global batch must be a positive number, not {global_batch}")
    by_placement: dict[str, dict[float, float]] = defaultdict(dict)
    for placement, batch, seconds in measured:
        if not placement.isdigit() or "0" in placement or not (0 < batch < np.inf and 0 < seconds < np.inf):
            raise ShoalError(
                f"not a measured placement: {placement!r}, batch {batch}, {seconds} s; "
                "write the GPUs of each node as digits, as in 22"
            )
        by_placement[placement][float(batch)] = float(seconds)
    seconds_by: dict[tuple[int, int], list[float]] = defaultdict(list)
    for placement, points in by_placement.items():
        gpus = sum(int(digit) for digit in placement)
        took_s = _iteration_s(points, global_batch / gpus)
        if took_s is not None:
            seconds_by[gpus, len(placement)].append(took_s)
    if not seconds_by:
        raise ShoalError(f"no placement of {model!r} was measured near a global batch of {global_batch:g}")
    return [(gpus, nodes, float(np.mean(s))) for (gpus, nodes), s in sorted(seconds_by.items())]


def _iteration_s(points: dict[float, float], batch: float) -> float | None:
    """Seconds for `batch` samples on each GPU; None below the smallest measured batch size."""
    batches = np.array(sorted(points))
    if batch < batches[0]:
        return None
    steps = int(np.ceil(batch / batches[-1]))
    return steps * float(np.interp(batch / steps, batches, [points[b] for b in batches]))
