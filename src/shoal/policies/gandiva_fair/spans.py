"""Gangs larger than any node: the nodes that they are bound to, and the GPUs on each of them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shoal.core.arrays import FloatArray, IntArray
from shoal.policies.gandiva_fair.tables import NOWHERE, SPANS, Nodes, Spans

#: (node, GPUs) of a gang that spans nodes, by ascending node.
Span = tuple[tuple[int, int], ...]


def number_spans(job_ids: NDArray[np.int64], home: IntArray, spans: dict[int, Span]) -> Spans:
    """Number the rows that span nodes: home SPANS - k for the k-th. Rows without a span are bound nowhere."""
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
    return Spans(
        np.array(kept, np.int64),
        np.array(start, np.int32),
        np.ascontiguousarray(table[:, 0]),
        np.ascontiguousarray(table[:, 1]),
    )


def gpus_of_nodes(spans: Spans, factor: FloatArray, nodes: int) -> FloatArray:
    """Sum over all spans of GPUs on each node times `factor[row]`."""
    each = np.repeat(factor[spans.rows], np.diff(spans.start))
    return np.bincount(spans.node, weights=spans.gpus * each, minlength=nodes).astype(np.float64)


def span_over(size: int, gpu_type: int, nodes: Nodes, free: IntArray, load: FloatArray) -> Span:
    """Nodes for a gang. Empty if the type has too few GPUs.

    If the gang can start now, it takes the nodes with the most free GPUs, otherwise the nodes with the lowest load.
    """
    mine = np.flatnonzero((nodes.gpu_type == gpu_type) & (nodes.gpus > 0))
    if free[mine].sum() >= size:
        mine, room = mine[np.lexsort((mine, -free[mine]))], free
    else:
        mine, room = mine[np.lexsort((mine, load[mine], -nodes.gpus[mine]))], nodes.gpus
    before = np.concatenate([[0], np.cumsum(room[mine])])
    if before[-1] < size:
        return ()
    take = np.minimum(room[mine], np.maximum(size - before[:-1], 0))
    return tuple(sorted((int(s), int(g)) for s, g in zip(mine, take) if g > 0))
