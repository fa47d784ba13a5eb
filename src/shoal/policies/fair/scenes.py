"""What there is to look ahead on: the jobs of a GPU type on its nodes, where these are few enough."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from shoal.policies.fair.kernels import IntArray
from shoal.policies.fair.outlook import Scene
from shoal.policies.fair.relief import MOST_GPUS
from shoal.policies.fair.round import Round, Rows

#: With more than these, one job is little to all that users have, and only those far behind are helped: `relief`.
_MOST_NODES = 16
_MOST_JOBS = 64


@dataclass(frozen=True, slots=True)
class Outset:
    """A scene, with the rows and nodes of the round that its numbers stand for."""

    rows: Rows
    nodes: Rows
    scene: Scene

    @property
    def small(self) -> Rows:
        return self.rows[: self.scene.small]

    def where(self, home: IntArray) -> IntArray:
        return np.searchsorted(self.nodes, home[self.small]).astype(np.int32)


def outsets(r: Round) -> Iterator[Outset]:
    """One for each type with some nodes; jobs whose user has no part of the type do not count."""
    for t in range(len(r.gpus_of_type)):
        nodes = np.flatnonzero((r.nodes.type_of == t) & (r.nodes.gpus > 0))
        if not 2 <= len(nodes) <= _MOST_NODES or r.nodes.gpus[nodes].max() > MOST_GPUS:
            continue
        mine = (r.types == t) & (r.weights[r.view.user, t] > 0)
        small = np.flatnonzero(mine & (r.home >= 0))
        spans = np.flatnonzero(mine[r.spans.rows])
        if 2 <= len(small) + len(spans) <= _MOST_JOBS:
            yield _outset(r, t, nodes, small, spans)


def _outset(r: Round, t: int, nodes: Rows, small: Rows, spans: Rows) -> Outset:
    rows = np.concatenate([small, r.spans.rows[spans]])
    users, user = np.unique(r.view.user[rows], return_inverse=True)
    a, b = r.spans.start[spans], r.spans.start[spans + 1]
    at = np.concatenate([np.zeros(0, np.int64), *(np.arange(x, y) for x, y in zip(a, b))]).astype(np.int64)
    scene = Scene(
        user=user.astype(np.int32),
        size=r.size[rows],
        small=len(small),
        waited_turns=r.waited_turns[rows],
        turn_quanta=r.size[rows] / np.maximum(r.rate[rows], 1e-9),
        patience_turns=float(r.patience_turns),
        gpus_of_node=r.nodes.gpus[nodes],
        owed=np.ascontiguousarray(r.owed[users, t]),
        part=np.ascontiguousarray(r.weights[users, t]),
        urgency=r.urgency[users],
        span_start=np.concatenate([[0], np.cumsum(b - a)]).astype(np.int32),
        span_node=np.searchsorted(nodes, r.spans.node[at]).astype(np.int32),
        span_gpus=r.spans.gpus[at],
    )
    return Outset(rows, nodes, scene)
