"""Priorities: among the jobs of one user, which start and grow first with the GPUs that the policy gives the user."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from shoal.core.arrays import IntArray
from shoal.core.decision import Decision
from shoal.core.view import View


def in_own_order(view: View, decision: Decision, gpus_of_type: IntArray, *, elastic: bool) -> Decision:
    """Divide each user's GPUs of each type anew among the user's jobs, by priority.

    Jobs that have GPUs and keep some by the policy's decision stay. Of the others, those of a higher priority start
    first. Then jobs of a higher priority grow first. Every user has as many GPUs as before: where gangs of other sizes
    would leave some idle, the policy's decision stays. Jobs that lose their turn take GPUs that nobody else could
    use. A policy that places jobs itself orders them itself.
    """
    if decision.placements is not None or not len(view):
        return decision
    priority = view.priority
    gpus = decision.gpus.copy()
    types = np.zeros(len(view), np.int32) if decision.gpu_type is None else decision.gpu_type.copy()
    for user in np.unique(view.user).tolist():
        rows = np.flatnonzero(view.user == user).astype(np.int32)
        if len(np.unique(priority[rows])) > 1:
            trial, trial_types = gpus.copy(), types.copy()
            _divide(view, rows, priority, trial, trial_types, elastic=elastic)
            if trial[rows].sum() == gpus[rows].sum():  # otherwise GPUs would be idle
                gpus, types = trial, trial_types
    if (gpus == decision.gpus).all() and (decision.gpu_type is None or (types == decision.gpu_type).all()):
        return decision
    _take_idle(view, np.flatnonzero((decision.gpus > 0) & (gpus == 0)), gpus, types, gpus_of_type, elastic)
    servers = decision.servers
    if servers is not None:
        servers = np.where(gpus == decision.gpus, servers, gpus * view.is_ps).astype(np.int32)
    return replace(
        decision, gpus=gpus, gpu_type=None if decision.gpu_type is None else types, servers=servers
    )


def _take_idle(
    view: View, rows: NDArray[np.intp], gpus: IntArray, types: IntArray, gpus_of_type: IntArray, elastic: bool
) -> None:
    """Start these rows on idle GPUs, where they fit."""
    has = gpus > 0
    given = np.bincount(types[has], weights=gpus[has], minlength=len(gpus_of_type)).astype(np.int32)
    free = gpus_of_type - given
    for row in rows.tolist():
        want = int((view.min_gpus if elastic else view.requested_gpus)[row])
        t = _type_for(view, row, want, free, -1, elastic)
        if t >= 0:
            gpus[row], types[row] = want, t
            free[t] -= want


def _divide(
    view: View, rows: IntArray, priority: IntArray, gpus: IntArray, types: IntArray, *, elastic: bool
) -> None:
    """Change `gpus` and `types` of these rows of one user."""
    before, before_types = gpus[rows].copy(), types[rows].copy()
    has = before > 0
    budget = np.bincount(before_types[has], weights=before[has], minlength=len(view.gpu_types)).astype(int)
    need = (view.min_gpus if elastic else view.requested_gpus)[rows]
    stays = has & (view.gpus[rows] > 0)
    gpus[rows], types[rows] = 0, np.where(has, before_types, -1)
    order = sorted(range(len(rows)), key=lambda k: (not stays[k], -priority[rows[k]], not has[k], rows[k]))
    for k in order:
        row, want = int(rows[k]), int(need[k])
        if stays[k]:
            want = min(want, int(before[k]))
        t = _type_for(view, row, want, budget, int(before_types[k]) if has[k] else -1, elastic)
        if t >= 0:
            gpus[row], types[row] = want, t
            budget[t] -= want
    if not elastic:
        return
    for k in sorted(order, key=lambda k: (-priority[rows[k]], not has[k], rows[k])):
        row = int(rows[k])
        if gpus[row]:
            t = int(types[row])
            more = min(int(budget[t]), int(view.type_max[t, row]) - int(gpus[row]))
            more -= more % int(view.step_gpus[row])
            gpus[row] += max(more, 0)
            budget[t] -= max(more, 0)


def _type_for(view: View, row: int, want: int, budget: IntArray, given: int, elastic: bool) -> int:
    """The type of the user's GPUs on which the row runs: the one that the policy chose, else the fastest; or -1."""

    def fits(t: int) -> bool:
        most = int(view.type_max[t, row])
        runs = most >= want if elastic else most > 0 and view.speeds[view.speed_at[t, row] + want] > 0
        return want <= budget[t] and bool(runs)

    if given >= 0 and fits(given):
        return given
    able = [t for t in range(len(budget)) if fits(t)]
    return max(able, key=lambda t: view.speeds[view.speed_at[t, row] + want], default=-1)
