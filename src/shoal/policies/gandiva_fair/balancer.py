"""Load balancing: an even ticket load per GPU over the nodes, by a few migrations at a time.

Stride is fair on each node. For the cluster to be fair, the nodes must carry equal loads,
ticketLoadPerGPU(s) = sum of the tickets of the jobs on s / GPUs of s (Chaudhary et al., EuroSys'20). Tickets are in
GPUs that jobs are due, so a load of 1 means that the jobs of a node are due exactly its GPUs.
"""

from __future__ import annotations

import numpy as np

from shoal.core.arrays import BoolArray, FloatArray
from shoal.core.compiled import inner, kernel
from shoal.policies.gandiva_fair.tables import Jobs, Nodes


@kernel
def ticket_load(jobs: Jobs, nodes: Nodes, spanning: FloatArray) -> FloatArray:
    """Ticket load per GPU of every node, 0 for a lost node.

    `spanning` holds, per node, the tickets of gangs that span nodes.
    """
    load = spanning.copy()
    for i in range(len(jobs.home)):
        if jobs.home[i] >= 0:
            load[jobs.home[i]] += jobs.due[i]
    for s in range(len(load)):
        load[s] = load[s] / nodes.gpus[s] if nodes.gpus[s] > 0 else 0.0
    return load


@kernel
def balance(
    jobs: Jobs, nodes: Nodes, movable: BoolArray, spanning: FloatArray, most_moves: int, min_gain: float
) -> list[tuple[int, int]]:
    """Migrations (row, to node) that even out the ticket load per GPU within each GPU type. Updates `jobs.home`.

    Each step moves a job from the node with the highest load to the node with the lowest. It picks the job that
    leaves the smallest difference, and the difference must shrink by more than `min_gain`. If no job qualifies, the
    node with the next highest load is tried.
    """
    load = ticket_load(jobs, nodes, spanning)
    moves = [(0, 0) for _ in range(0)]
    for t in range(nodes.gpu_type.max() + 1):
        settled = np.zeros(len(load), np.bool_)
        while len(moves) < most_moves:
            high, low = -1, -1
            for s in range(len(load)):
                if nodes.gpu_type[s] == t and nodes.gpus[s] > 0:
                    if not settled[s] and (high < 0 or load[s] > load[high]):
                        high = s
                    if low < 0 or load[s] < load[low]:
                        low = s
            if high < 0 or load[high] - load[low] <= min_gain:
                break
            i = _best_to_move(jobs, nodes, movable, load, high, low, min_gain)
            if i < 0:
                settled[high] = True
                continue
            load[high] -= jobs.due[i] / nodes.gpus[high]
            load[low] += jobs.due[i] / nodes.gpus[low]
            jobs.home[i] = low
            moves.append((i, low))
    return moves


@inner
def _best_to_move(
    jobs: Jobs, nodes: Nodes, movable: BoolArray, load: FloatArray, high: int, low: int, min_gain: float
) -> int:
    """The row on `high` that leaves the smallest difference of loads if it moves to `low`; -1 if none gains enough."""
    best, least = -1, load[high] - load[low] - min_gain
    for i in range(len(jobs.home)):
        if jobs.home[i] == high and movable[i] and jobs.size[i] <= nodes.gpus[low]:
            after = load[high] - load[low] - jobs.due[i] * (1.0 / nodes.gpus[high] + 1.0 / nodes.gpus[low])
            if abs(after) < least:
                best, least = i, abs(after)
    return best
