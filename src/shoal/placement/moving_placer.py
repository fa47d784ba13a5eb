"""Move running jobs if the move pays off.

A job that spans more nodes than necessary runs slower than it could. A move costs `move_s` seconds without
progress. Over the time T, the smaller of a horizon and the remaining time of the job,

    gain = (v'/v) max(T - move_s, 0) - T        in seconds of the job's progress at its present speed v

A job moves if its gain is positive. If another job is in the way, that job moves too, and its cost (move_s)
is subtracted from the gain: a second of progress counts the same for every job. Gains beyond the horizon do
not count, because jobs may end in the meantime and free better places.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isnan

import numpy as np
from numpy.typing import NDArray

from shoal.core.cluster import Cluster
from shoal.core.decision import Decision
from shoal.core.plan import Placement
from shoal.core.supply import Supply
from shoal.core.view import View
from shoal.placement import pack
from shoal.placement.fragmentation import fewest_nodes, free_gpus
from shoal.placement.placer import Placed, Placer
from shoal.placement.validate import amount, whole

IntArray = NDArray[np.int32]
#: Iterations per second of a job (by id) on a GPU type at a placement.
SpeedOn = Callable[[int, str, Placement], float]
#: The same, with the job's number of parameter servers as the last argument.
SpeedWith = Callable[[int, str, Placement, int], float]


@dataclass(frozen=True, slots=True)
class MoveRule:
    """The cost of a move, the horizon of its gains, and the maximum number of moves per decision."""

    move_s: float = 30.0
    horizon_s: float = 1800.0
    max_moves: int = 4

    def __post_init__(self) -> None:
        amount("the seconds that a move costs", self.move_s)
        amount("the horizon in seconds", self.horizon_s)
        whole("the most moves", self.max_moves, 0)


@dataclass(frozen=True, slots=True)
class Move:
    """Jobs that move together (one job, and those that make room for it), and the gain in seconds of progress."""

    placements: Mapping[int, Placement]
    gain_s: float


def gain_s(speed_now: float, speed_there: float, left: float, rule: MoveRule) -> float:
    """The gain of a move for the job. `left` is its remaining iterations; nan if unknown."""
    if not (0 < speed_now < np.inf and 0 < speed_there < np.inf):
        return -np.inf
    counted_s = rule.horizon_s if isnan(left) else min(rule.horizon_s, max(left, 0.0) / speed_now)
    return speed_there / speed_now * max(counted_s - rule.move_s, 0.0) - counted_s


def find_moves(
    cluster: Cluster,
    gpus_of_node: IntArray,
    current: Mapping[int, Placement],
    left: Mapping[int, float],
    speed: SpeedOn,
    rule: MoveRule,
) -> list[Move]:
    """Moves with a gain, best first, that can all be carried out together; at most `max_moves` jobs."""
    placements = dict(current)
    free = free_gpus(gpus_of_node, placements.values())
    moves: list[Move] = []
    moved: set[int] = set()
    while True:
        candidates = [
            move
            for job_id, placement in placements.items()
            if len(placement) > 1 and job_id not in moved
            for move in _ways(cluster, free, placements, job_id, left, speed, rule)
            if move.gain_s > 0 and not moved.intersection(move.placements)
            if len(moved) + len(move.placements) <= rule.max_moves
        ]
        if not candidates:
            return moves
        best = max(candidates, key=lambda m: m.gain_s)
        for job_id, placement in best.placements.items():
            free = free_gpus(free, [placement]) + _on_nodes(placements[job_id], len(free))
            placements[job_id] = placement
        moves.append(best)
        moved.update(best.placements)


def _on_nodes(placement: Placement, nodes: int) -> IntArray:
    held = np.zeros(nodes, np.int32)
    for node, gpus in placement:
        held[node] += gpus
    return held


def _ways(
    cluster: Cluster,
    free: IntArray,
    placements: Mapping[int, Placement],
    job_id: int,
    left: Mapping[int, float],
    speed: SpeedOn,
    rule: MoveRule,
) -> list[Move]:
    """Moves that bring a multi-node job onto fewer nodes: into free GPUs, or by moving other jobs away."""
    now = placements[job_id]
    gpus = sum(g for _, g in now)
    gpu_type = int(cluster.type_of_node[now[0][0]])
    type_name = cluster.gpu_types[gpu_type]
    speed_now = speed(job_id, type_name, now)

    def worth(there: Placement) -> float:
        return gain_s(speed_now, speed(job_id, type_name, there), left.get(job_id, np.nan), rule)

    largest = int(cluster.gpus_of_node[cluster.type_of_node == gpu_type].max())
    if all(worth(_dealt(gpus, nodes)) <= 0 for nodes in range(-(-gpus // largest), len(now))):
        return []  # the usual case: no need to search for room
    mine = _on_nodes(now, len(free))
    room = pack.available(free + mine, cluster.type_of_node, gpu_type)
    ways: list[Move] = []
    nodes = fewest_nodes(room, gpus)
    if 0 < nodes < len(now):
        taken = pack.span(room, gpus, cluster.rack_of_node, cluster.domain_of_node)
        where = tuple((n, int(taken[n])) for n in np.flatnonzero(taken).tolist())
        ways.append(Move({job_id: where}, worth(where)))
    alone = worth(_dealt(gpus, 1))
    if nodes != 1 and alone > rule.move_s:
        pushed = _push_aside(cluster, free, placements, job_id, gpus, gpu_type)
        if pushed:
            ways.append(Move(pushed, alone - rule.move_s * (len(pushed) - 1)))
    return ways


def _dealt(gpus: int, nodes: int) -> Placement:
    """A placement in equal parts on this many nodes, for a speed estimate."""
    return tuple((n, gpus // nodes + (n < gpus % nodes)) for n in range(nodes))


def _push_aside(
    cluster: Cluster,
    free: IntArray,
    placements: Mapping[int, Placement],
    job_id: int,
    gpus: int,
    gpu_type: int,
) -> dict[int, Placement]:
    """One node for the job, and other nodes for the single-node jobs in its way; empty if impossible.

    Tries the node with the most room first. The smallest jobs on it move away until the job fits.
    """
    room = free + _on_nodes(placements[job_id], len(free))
    able = np.flatnonzero((cluster.type_of_node == gpu_type) & (cluster.gpus_of_node >= gpus))
    for node in sorted(able.tolist(), key=lambda n: (-room[n], n)):
        after = room.copy()
        pushed: dict[int, Placement] = {}
        others = [(p[0][1], j) for j, p in placements.items() if len(p) == 1 and p[0][0] == node]
        for size, other in sorted(others):
            if after[node] >= gpus:
                break
            avail = pack.available(after, cluster.type_of_node, gpu_type)
            avail[node] = 0
            elsewhere = pack.best_node(avail, size, cluster.rack_of_node, -1)
            if elsewhere >= 0:
                pushed[other] = ((int(elsewhere), size),)
                after[node] += size
                after[elsewhere] -= size
        if after[node] >= gpus:
            return {job_id: ((node, gpus),), **pushed}
    return {}


class MovingPlacer:
    """A `Placer` that delegates placement to another one, and then moves jobs if that pays off."""

    def __init__(
        self,
        inner: Placer,
        speed: SpeedWith,
        rule: MoveRule | None = None,
        may_move: Callable[[int], bool] = lambda job_id: True,
    ) -> None:
        self.inner, self.speed, self.rule, self.may_move = inner, speed, rule or MoveRule(), may_move

    def place(self, view: View, decision: Decision, supply: Supply, current: dict[int, Placement]) -> Placed:
        placed = self.inner.place(view, decision, supply, current)
        after = {j: p for j, p in (current | placed.placements).items() if p}
        if all(len(p) == 1 for p in after.values()):
            return placed
        given = {int(view.job_ids[row]) for row in decision.placements or ()}
        # Exclude jobs that this decision reconfigures anyway, jobs that the policy placed, and jobs that cannot move.
        unsettled = {
            j: p for j, p in after.items() if j in placed.placements or j in given or not self.may_move(j)
        }
        settled = {j: p for j, p in after.items() if j not in unsettled}
        usable = free_gpus(supply.gpus_of_node, unsettled.values())
        remaining = view.remaining_now(view.now_s)
        left = {j: float(remaining[view.row(j)]) for j, p in settled.items() if len(p) > 1}

        def speed(job_id: int, gpu_type: str, placement: Placement) -> float:
            return self.speed(job_id, gpu_type, placement, int(view.servers[view.row(job_id)]))

        moves = find_moves(supply.cluster, usable, settled, left, speed, self.rule)
        moved = {j: p for move in moves for j, p in move.placements.items()}
        return Placed(placed.placements | moved, placed.cut)
