"""Pre-scheduling: launch the next job on a GPU whose job is about to end (Liquid, TPDS'21, authors' code).

A job runs for some time before its first use of the GPU (`pre`) and after its last (`post`). If no GPU is
vacant and the cluster is busy enough, a job with one worker may be launched on a GPU with exactly one job if

    elapsed > total - post - pre of the new job - 15 s

The new job prepares and waits. It may use the GPU once utilisation was below 10 % in two consecutive reports
and the GPU has the memory it needs, or is almost empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shoal.placement.placer import Unplaced
from shoal.placement.validate import amount

#: A GPU is idle after this many consecutive reports below this utilisation.
IDLE_UTILISATION, IDLE_REPORTS = 0.10, 2
#: A GPU with less memory in use than this counts as empty, whatever the job needs.
EMPTY_MB = 100.0


@dataclass(frozen=True, slots=True)
class Running:
    """The job on a GPU: elapsed and total run time, and the time after its last use of the GPU.

    `alone` is false if the GPU has several jobs, or none.
    """

    elapsed_s: float
    total_s: float
    post_s: float
    alone: bool = True


@dataclass(frozen=True, slots=True)
class PreRule:
    """When pre-scheduling is allowed. `busy_from` above 1 turns it off; the paper's experiments use 0.5."""

    busy_from: float = 0.5
    extra_s: float = 15.0

    def __post_init__(self) -> None:
        amount("the part of the GPUs in use from which jobs are launched early", self.busy_from)
        amount("the seconds that a job may be early", self.extra_s)


_USUAL = PreRule()


def may_launch_early(running: Running, pre_s: float, extra_s: float = 15.0) -> bool:
    """The rule above for one GPU. Unknown (nan) or invalid times never qualify."""
    times = (running.elapsed_s, running.total_s, running.post_s, pre_s)
    if not running.alone or not all(0.0 <= time_s < np.inf for time_s in times):
        return False
    return running.elapsed_s > running.total_s - running.post_s - pre_s - extra_s


def find_ending_gpu(
    gpus: Sequence[Running | None],
    pre_s: float,
    gpus_wanted: int = 1,
    rule: PreRule = _USUAL,
) -> int | Unplaced:
    """The first GPU whose job ends soon enough, or why there is none. None in `gpus` is a vacant GPU."""
    if gpus_wanted != 1:
        return Unplaced(f"only jobs with one GPU are launched early, and it wants {gpus_wanted}")
    if any(g is None for g in gpus):
        return Unplaced("a GPU is vacant; nothing need be launched early")
    if rule.busy_from > 1:
        return Unplaced("launching early is turned off")
    for i, running in enumerate(gpus):
        if running is not None and may_launch_early(running, pre_s, rule.extra_s):
            return i
    return Unplaced("no job on a GPU of its own is known to end soon enough")


def may_enter(utilisations: Sequence[float], free_mb: float, used_mb: float, need_mb: float) -> bool:
    """Whether a pre-scheduled job may begin, given the GPU's reports of utilisation so far."""
    last = utilisations[-IDLE_REPORTS:]
    idle = len(last) == IDLE_REPORTS and all(u < IDLE_UTILISATION for u in last)
    return idle and (free_mb > need_mb or used_mb < EMPTY_MB)
