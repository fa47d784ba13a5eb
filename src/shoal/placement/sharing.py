"""Whether a job may be co-located on a GPU in use (Liquid, TPDS'21, following the authors' code).

Only jobs with one worker on one GPU share, and only when the cluster is busy enough. A GPU in use qualifies if

    memory total > memory allocated + memory of the job
    predicted utilisation of the job and of all jobs on the GPU < limit (1.3: 130 %)

The first GPU that qualifies is taken. Measurements of co-located jobs do not show what a job needs alone, so
they must not train the resource estimates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from shoal.placement.placer import Unplaced
from shoal.placement.validate import amount


@dataclass(frozen=True, slots=True)
class GpuUse:
    """One GPU: its memory, and the predicted utilisation (0..1) of each job on it."""

    memory_mb: float
    allocated_mb: float = 0.0
    utilisations: tuple[float, ...] = ()

    @property
    def jobs(self) -> int:
        return len(self.utilisations)


@dataclass(frozen=True, slots=True)
class SharingRule:
    """When sharing is allowed. `busy_from` above 1 turns sharing off; the paper's experiments use 0.75."""

    busy_from: float = 0.75
    max_utilisation: float = 1.3

    def __post_init__(self) -> None:
        amount("the part of the GPUs in use from which they are shared", self.busy_from)
        amount("the utilisation up to which a GPU is shared", self.max_utilisation)


_USUAL = SharingRule()


def find_shared_gpu(
    gpus: Sequence[GpuUse],
    memory_mb: float,
    utilisation: float,
    gpus_wanted: int = 1,
    rule: SharingRule = _USUAL,
) -> int | Unplaced:
    """The GPU that a job may share, or why there is none."""
    if not (0 <= memory_mb < inf and 0 <= utilisation < inf):
        return Unplaced("its memory and utilisation are not known, so it gets a GPU of its own")
    if gpus_wanted != 1:
        return Unplaced(f"only jobs with one GPU share, and it wants {gpus_wanted}")
    busy = sum(g.jobs > 0 for g in gpus) / len(gpus) if gpus else 0.0
    if busy < rule.busy_from:
        return Unplaced(f"{busy:.0%} of the GPUs are in use; sharing begins at {rule.busy_from:.0%}")
    for i, gpu in enumerate(gpus):
        if not gpu.jobs or gpu.allocated_mb < 0 or min(gpu.utilisations) < 0:
            continue
        fits = gpu.memory_mb > gpu.allocated_mb + memory_mb
        if fits and utilisation + sum(gpu.utilisations) < rule.max_utilisation:
            return i
    return Unplaced(
        f"no GPU in use has {memory_mb:.0f} MB and {utilisation:.0%} of utilisation to spare "
        f"below {rule.max_utilisation:.0%}"
    )
