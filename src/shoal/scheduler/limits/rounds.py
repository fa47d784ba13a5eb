"""Several decisions within one step, as one: what the plan compares the outcome with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from shoal.core.plan import DECIDED
from shoal.scheduler.difference import After, Before


def before_all_rounds(
    touched: Iterable[int],
    began: Mapping[int, After],
    forced: Mapping[int, Before],
    late: Mapping[int, Before],
) -> dict[int, Before]:
    """What each of the `touched` jobs had before the first of the decisions, with the cause of its change.

    `began`: the shares when the decisions began. `forced`: jobs that lost GPUs to the events of this step, before them.
    `late`: jobs that lost GPUs since: a limit does not let them run any more.
    """
    found = {}
    for job_id in sorted(touched):
        if job_id in forced:
            found[job_id] = forced[job_id]
        elif job_id in began:
            had = began[job_id]
            cause = late[job_id].cause if job_id in late else DECIDED
            found[job_id] = Before(had.gpus, had.gpu_type, had.servers, had.placement, cause)
    return found
