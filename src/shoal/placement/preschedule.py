"""Starting the next job early on a GPU whose job is about to end (Liquid, TPDS'21, as its code decides).

A job spends a while before its first use of the GPU (`pre`) and after its last (`post`). When nothing is
vacant and the cluster is busy enough, a job of one worker may be launched on a GPU with exactly one job if

    elapsed > total - post - pre of the new job - 15 s

It prepares and waits; it is let in when the GPU has been below 10 % for two reports in a row and has the
memory it needs, or is all but empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shoal.placement.placer import Unplaced
from shoal.placement.validate import amount

#: Below this the GPU counts as idle, and after that many reports in a row it is.
IDLE_UTILISATION, IDLE_REPORTS = 0.10, 2
#: With no more than this in use, memory is no obstacle whatever the job asks for.
EMPTY_MB = 100.0


@dataclass(frozen=True, slots=True)
class Running:
    """The job on a GPU: how long it has run and will run, and how long it will not need the GPU at its end.

    `alone` is false when more than one job is on the GPU, or none.
    """

    elapsed_s: float
    total_s: float
    post_s: float
    alone: bool = True


@dataclass(frozen=True, slots=True)
class PreRule:
    """When launching early is allowed. `busy_from` above 1 turns it off; the experiments use 0.5."""

    busy_from: float = 0.5
    extra_s: float = 15.0

    def __post_init__(self) -> None:
        amount("the part of the GPUs in use from which jobs are launched early", self.busy_from)
        amount("the seconds that a job may be early", self.extra_s)


_USUAL = PreRule()


def may_launch_early(running: Running, pre_s: float, extra_s: float = 15.0) -> bool:
    """The rule above for one GPU. Unknown times (nan), and those that cannot be, never qualify."""
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
    """The first GPU whose job ends soon enough, or why there is none; None stands for a vacant GPU."""
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
    """Whether a job that waits on the GPU may begin, by its reports of utilisation so far."""
    last = utilisations[-IDLE_REPORTS:]
    idle = len(last) == IDLE_REPORTS and all(u < IDLE_UTILISATION for u in last)
    return idle and (free_mb > need_mb or used_mb < EMPTY_MB)
