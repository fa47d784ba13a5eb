"""The progress of a job over time, computed from the changes of its share.

The record contains shares, not progress. Between changes a job trains at its profile's speed, and a new share
takes effect according to the cost model. This is exact in a pool of GPUs. On nodes, the record contains neither the
type and spread of a share nor the load of a shared GPU: there the curve is scaled to end at 1 when the job ends.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shoal.core.profile import Profile
from shoal.sim.costs import Costs
from shoal.sim.report.timelines import changes_by_job
from shoal.sim.run_record import RunRecord

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

#: A run stores the progress of this many jobs; the page shows one of them.
MAX_EARLY = 40


@dataclass(frozen=True, slots=True)
class Curve:
    """Fraction of the work done, by time since submission; linear in between."""

    time_s: FloatArray
    done: FloatArray


@dataclass(frozen=True, slots=True)
class Shares:
    """The shares of a job, by time since its submission."""

    time_s: FloatArray
    gpus: IntArray


def early_jobs(record: RunRecord, work: FloatArray, most: int = MAX_EARLY) -> list[int]:
    """Candidates for the progress chart: the largest jobs submitted in the first tenth of the trace.

    Half of them were submitted at the very beginning. The choice depends on the trace only, so it is the same in
    every run.
    """
    submit = np.array([job.submit_s for job in record.jobs])
    if not len(submit):
        return []
    by_size = np.argsort(-work, kind="stable")
    since = submit[by_size] - submit.min()
    first = by_size[since == 0][: most // 2]
    early = by_size[since <= np.ptp(submit) / 10]
    others = early[~np.isin(early, first)][: most - len(first)]
    return sorted(np.concatenate([first, others]).tolist())


def shares_of(record: RunRecord, which: list[int]) -> list[Shares]:
    """The shares of each of these jobs over time."""
    order, first = changes_by_job(record)
    times, gpus = np.asarray(record.change_s, np.float64), np.asarray(record.change_gpus, np.int64)
    mine = [order[first[j] : first[j + 1]] for j in which]
    return [Shares(times[rows] - record.jobs[j].submit_s, gpus[rows]) for j, rows in zip(which, mine)]


def progress_of(
    record: RunRecord, j: int, shares: Shares, profile: Profile, gpu_type: str, costs: Costs
) -> Curve:
    """The progress of job `j` from its submission to its end, or to the end of the run."""
    job = record.jobs[j]
    finished = bool(np.isfinite(record.finish_s[j]))
    end_s = float(record.finish_s[j] if finished else record.end_s) - job.submit_s
    kind = gpu_type if profile.knows(gpu_type) else profile.gpu_types[0]
    speed = profile.curve(kind).speed
    trained = trained_shares(shares.time_s.tolist(), shares.gpus.tolist(), costs, job.model)
    at, done = [0.0], [0.0]
    for k, (now, share) in enumerate(trained):
        until = min(trained[k + 1][0], end_s) if k + 1 < len(trained) else end_s
        rate = float(speed[min(share, len(speed) - 1)])
        at += [min(now, end_s), until]
        done += [done[-1], done[-1] + rate * max(until - now, 0.0)]
    part = np.array(done) / (job.iterations or np.inf)
    if finished and part[-1] > 0:
        part /= part[-1]
    return Curve(np.array(at), np.minimum(part, 1.0))


def trained_shares(times: list[float], gpus: list[int], costs: Costs, model: str) -> list[tuple[float, int]]:
    """(time, share that trains from then on) of a job that got these shares at these times.

    It follows the simulator's rules: the first start is free; a restart stops the job; with concurrent
    reconfiguration the old workers train while new ones prepare, and a newer share replaces a pending one.
    """
    out: list[tuple[float, int]] = []
    had, ready, growing_to = 0, np.inf, 0
    for k, (now, share) in enumerate(zip(times, gpus)):
        had = growing_to if ready <= now else had
        ready = np.inf
        overtaken = []
        while out and out[-1][0] > now:
            overtaken.append(out.pop())
        if k == 0 or costs.kind == "none" or share in (0, had):
            out.append((now, share))
        elif costs.kind in ("restart", "suspend"):  # a suspended job loses as much on average, see `costs_of`
            out += [(now, 0), (now + costs.restart_of(model), share)]
        elif share < had or had == 0:
            standstill_s = costs.pause_s + (costs.prepare_s if had == 0 else 0.0)
            out += [(now, 0), (now + standstill_s, share)]
        else:
            ready, growing_to = now + costs.prepare_s, share
            # A pause that has not ended yet continues while the new workers prepare.
            out += [(at, s) for at, s in overtaken if s == had and at < ready]
            out += [(ready, 0), (ready + costs.pause_s, share)]
            continue
        had = share
    return out
