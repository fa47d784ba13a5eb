"""What a choice of gangs is made from: the jobs of a GPU type on its nodes, where these are few enough."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shoal.policies.gandiva_fair.guard import Scene
from shoal.policies.gandiva_fair.relief import MOST_GPUS
from shoal.policies.gandiva_fair.round import Round, Rows

#: With more than these, one job is little to all that users have, and only those far behind are helped: `relief`.
_MOST_NODES = 16
_MOST_JOBS = 64


@dataclass(frozen=True, slots=True)
class Outset:
    """A scene, with the rows and nodes of the round that its numbers stand for."""

    rows: Rows
    nodes: Rows
    scene: Scene
    #: [row, node]: GPUs that each row takes there, if it runs.
    place: NDArray[np.int64]


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
    part = r.weights[users, t]
    scene = Scene(
        user=user.astype(np.int32),
        size=r.size[rows],
        small=len(small),
        gpus=int(r.nodes.gpus[nodes].sum()),
        widest=int(r.nodes.gpus[nodes].max()),
        owed=np.ascontiguousarray(r.owed[users, t]),
        part=part / part.sum(),
        urgency=r.urgency[users],
    )
    place = np.zeros((len(rows), len(nodes)), np.int64)
    place[np.arange(len(small)), np.searchsorted(nodes, r.home[small])] = r.size[small]
    for i, k in enumerate(spans.tolist(), len(small)):
        own = slice(r.spans.start[k], r.spans.start[k + 1])
        place[i, np.searchsorted(nodes, r.spans.node[own])] = r.spans.gpus[own]
    return Outset(rows, nodes, scene, place)
