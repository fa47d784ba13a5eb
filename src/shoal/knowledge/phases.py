"""The phases of a finished job for pre-scheduling (Liquid): before and after its use of the GPU.

pre:  from the start to the first sample of GPU utilisation above 15 %;
post: from the last such sample to the end.
Both are halved if together they would be the whole run.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shoal.knowledge.speed_models import Floats
from shoal.knowledge.unknown import Unknown

BUSY_ABOVE = 15.0


@dataclass(frozen=True, slots=True)
class Phases:
    pre_s: float
    post_s: float
    total_s: float


def phases_of(sample_s: Floats, gpu_util: Floats, start_s: float, end_s: float) -> Phases | Unknown:
    """Phases from samples of utilisation (in percent) at the times `sample_s`."""
    total_s = end_s - start_s
    if not 0 < total_s < np.inf:
        return Unknown(f"the job ended {total_s} s after its start")
    if len(sample_s) != len(gpu_util):
        return Unknown("the number of times and samples differ")
    seen_s, percent = np.asarray(sample_s, np.float64), np.asarray(gpu_util, np.float64)
    if not ((seen_s >= start_s) & (seen_s <= end_s)).all() or not np.isfinite(percent).all():
        return Unknown("samples must be numbers, seen between the start and the end of the job")
    busy = np.flatnonzero(percent > BUSY_ABOVE)
    if len(busy) == 0:
        return Unknown(f"its GPU was never busy above {BUSY_ABOVE:.0f} %")
    pre_s = float(sample_s[busy[0]] - start_s)
    post_s = float(end_s - sample_s[busy[-1]])
    if pre_s + post_s >= total_s:
        pre_s, post_s = pre_s / 2, post_s / 2
    return Phases(max(pre_s, 0.0), max(post_s, 0.0), total_s)
