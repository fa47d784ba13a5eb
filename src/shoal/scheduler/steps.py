"""Shares of jobs with a step: multiples of it only, whatever the policy decides.

A policy may give such a job any number within its range. The number is rounded down here, and the GPUs that this frees
are offered to all jobs. So no policy has to know of steps.
"""

from __future__ import annotations

from dataclasses import replace
from heapq import heapify, heappop, heappush
from typing import Any

import numpy as np

from shoal.core.arrays import FloatArray, IntArray
from shoal.core.decision import Decision
from shoal.core.plan import Placement
from shoal.core.supply import Supply
from shoal.core.view import View
from shoal.policies.base import Policy


def in_steps(view: View, decision: Decision, supply: Supply, policy: Policy, now_s: float) -> Decision:
    """The decision with multiples of each job's step. GPUs that are free then are given to jobs that can use them."""
    lost = decision.gpus % view.step_gpus
    if not lost.any():
        return decision
    gpus = decision.gpus - lost
    types = np.zeros(len(view), np.int32) if decision.gpu_type is None else decision.gpu_type.copy()
    placements = decision.placements
    if placements is not None:  # rows that are rounded are left to the placement
        placements = {row: where for row, where in placements.items() if not lost[row]}
    elif decision.idle_because is None:
        has = gpus > 0
        given = np.bincount(types[has], weights=gpus[has], minlength=len(supply.gpus_of_type))
        free = supply.gpus_of_type - given.astype(np.int32)
        if policy.backfills:
            _start(view, gpus, types, free)
        _grow(view, gpus, types, free, lost / view.step_gpus, policy.wish_gpus(view), now_s)
    servers = decision.servers
    if servers is not None:
        servers = np.where(gpus == decision.gpus, servers, gpus * view.is_ps).astype(np.int32)
    gpu_type = None if decision.gpu_type is None else types
    return replace(decision, gpus=gpus, gpu_type=gpu_type, servers=servers, placements=placements)


def _start(view: View, gpus: IntArray, types: IntArray, free: IntArray) -> None:
    """Start jobs without a share where their minimum is free. Jobs that run now come first."""
    waiting = np.flatnonzero((gpus == 0) & (view.min_gpus <= free.max()))
    for row in sorted(waiting.tolist(), key=lambda row: view.gpus[row] == 0):
        want = int(view.min_gpus[row])
        fits = [t for t in range(len(free)) if want <= free[t] and want <= view.type_max[t, row]]
        if fits:
            t = max(fits, key=lambda t: (view.gpu_type[row] == t, view.speeds[view.speed_at[t, row] + want]))
            gpus[row], types[row] = want, t
            free[t] -= want


def _grow(
    view: View,
    gpus: IntArray,
    types: IntArray,
    free: IntArray,
    lost: FloatArray,
    wish: IntArray,
    now_s: float,
) -> None:
    """Give free GPUs to jobs that run, one step at a time, until no step fits.

    First to those that have more now, so that they are not resized; then to those that lost the largest part of a step
    by rounding; then to those that become faster by the largest part per GPU.
    """
    step = view.step_gpus
    most = np.minimum(view.type_max[types, np.arange(len(view))], wish)
    able = (gpus > 0) & (gpus + step <= most) & (step <= free[types]) & ~(view.remaining_now(now_s) <= 0)
    rows = np.flatnonzero(able)
    stays = (view.gpus[rows] > gpus[rows]) & (view.gpu_type[rows] == types[rows])
    gain = _gain(view.speeds, view.speed_at[types[rows], rows] + gpus[rows], step[rows])
    turns = list(zip((~stays).tolist(), (-lost[rows]).tolist(), (-gain).tolist(), rows.tolist()))
    heapify(turns)
    while turns:
        *_, row = heappop(turns)
        more, t, at = int(step[row]), int(types[row]), int(view.speed_at[types[row], row])
        if more > free[t]:
            continue  # and never again: what is free only becomes less
        free[t] -= more
        gpus[row] += more
        if gpus[row] + more <= most[row]:
            stays_on = view.gpus[row] > gpus[row] and view.gpu_type[row] == t
            gain_now = float(_gain(view.speeds, at + int(gpus[row]), more))
            heappush(turns, (not stays_on, 0.0, -gain_now, row))


def _gain(speeds: FloatArray, at: Any, step: Any) -> Any:
    """By which part a job becomes faster per GPU of its next step."""
    return (speeds[at + step] / speeds[at] - 1.0) / step


def trimmed(placement: Placement, lost_node: int, step: int) -> Placement:
    """What is left of a placement without a node: a multiple of the step."""
    rest = {node: gpus for node, gpus in placement if node != lost_node}
    surplus = sum(rest.values()) % step
    for node in sorted(rest, key=lambda n: (rest[n], -n)):  # where the job has the fewest first
        give = min(surplus, rest[node])
        rest[node] -= give
        surplus -= give
    return tuple((node, gpus) for node, gpus in rest.items() if gpus)
