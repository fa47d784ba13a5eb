"""Gangs larger than any node: which nodes they are bound to, and with how many GPUs of each."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shoal.policies.gandiva_fair.kernels import NOWHERE, SPANS, FloatArray, IntArray

#: (node, GPUs) of a gang that spans nodes, by ascending node.
Span = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class SpanArrays:
    """The spans of some rows end to end: row rows[k] holds gpus[j] of node[j], start[k] <= j < start[k+1]."""

    rows: NDArray[np.int64]
    start: IntArray
    node: IntArray
    gpus: IntArray

    def gpus_of_nodes(self, factor: FloatArray, nodes: int) -> FloatArray:
        """GPUs on each node, each row's times `factor[row]`."""
        if not len(self.rows):
            return np.zeros(nodes)
        each = np.repeat(factor[self.rows], np.diff(self.start))
        return np.bincount(self.node, weights=self.gpus * each, minlength=nodes).astype(np.float64)


NO_SPANS = SpanArrays(
    np.zeros(0, np.int64), np.zeros(1, np.int32), np.zeros(0, np.int32), np.zeros(0, np.int32)
)


def number_spans(job_ids: NDArray[np.int64], home: IntArray, spans: dict[int, Span]) -> SpanArrays:
    """Number the rows that span nodes (home SPANS - k for the k-th); who has no span is bound nowhere."""
    rows = np.flatnonzero(home <= SPANS)
    kept: list[int] = []
    start: list[int] = [0]
    flat: list[tuple[int, int]] = []
    for row, job in zip(rows.tolist(), job_ids[rows].tolist()):
        span = spans.get(job)
        if span is None:
            home[row] = NOWHERE
            continue
        home[row] = SPANS - len(kept)
        kept.append(row)
        flat.extend(span)
        start.append(len(flat))
    table = np.array(flat, np.int32).reshape(-1, 2)
    return SpanArrays(
        np.array(kept, np.int64),
        np.array(start, np.int32),
        np.ascontiguousarray(table[:, 0]),
        np.ascontiguousarray(table[:, 1]),
    )


def span_over(
    size: int, gpu_type: int, type_of_node: IntArray, gpus_of_node: IntArray, free: IntArray, load: FloatArray
) -> Span:
    """Nodes for a gang: those with most GPUs idle if it can start at once, else the least loaded; or none."""
    nodes = np.flatnonzero((type_of_node == gpu_type) & (gpus_of_node > 0))
    if free[nodes].sum() >= size:
        nodes, room = nodes[np.lexsort((nodes, -free[nodes]))], free
    else:
        nodes, room = nodes[np.lexsort((nodes, load[nodes], -gpus_of_node[nodes]))], gpus_of_node
    before = np.concatenate([[0], np.cumsum(room[nodes])])
    if before[-1] < size:
        return ()
    take = np.minimum(room[nodes], np.maximum(size - before[:-1], 0))
    return tuple(sorted((int(s), int(g)) for s, g in zip(nodes, take) if g > 0))
