"""Assignment of parameter blocks to parameter servers: that of Optimus (EuroSys'18), and two baselines.

Optimus minimises (i) the largest difference of parameter bytes between two servers, (ii) the total number of
requests per step, and (iii) the largest difference of requests between two servers. With
avg = total / servers, and blocks in decreasing size:

    size <= 1 % of avg   to the server with the fewest requests
    size <= avg          best fit: the fullest server that holds it without exceeding avg, else the least loaded
    size >  avg          in slices: servers by increasing load, each filled up to avg; the last slice best fit

Each piece is one request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shoal.core.errors import ShoalError
from shoal.placement.validate import whole

#: Blocks up to this fraction of a server's average load are assigned by number of requests, not by size.
TINY = 0.01
#: MXNet splits blocks with this many elements or more over all servers, and hashes keys with this prime.
MXNET_BIG, MXNET_PRIME = 10**6, 9973


@dataclass(frozen=True, eq=False)
class Assignment:
    """Elements and requests of each server, and the pieces as (block, server, elements)."""

    load: NDArray[np.int64]
    requests: NDArray[np.int64]
    pieces: tuple[tuple[int, int, int], ...]

    @property
    def max_load_difference(self) -> int:
        return int(self.load.max() - self.load.min())

    @property
    def total_requests(self) -> int:
        return int(self.requests.sum())


class _Servers:
    def __init__(self, blocks: Sequence[int], servers: int) -> None:
        whole("the number of servers", servers, 1, 10**6)
        if not blocks:
            raise ShoalError("parameter blocks must be given, each of at least one element")
        for size in blocks:
            whole("a parameter block", size, 1, 10**15)
        self.load = np.zeros(servers, np.int64)
        self.requests = np.zeros(servers, np.int64)
        self.pieces: list[tuple[int, int, int]] = []

    def give(self, block: int, server: int, elements: int) -> None:
        self.load[server] += elements
        self.requests[server] += 1
        self.pieces.append((block, server, elements))

    def done(self) -> Assignment:
        return Assignment(self.load, self.requests, tuple(self.pieces))


def balanced(blocks: Sequence[int], servers: int) -> Assignment:
    """The assignment of Optimus."""
    at = _Servers(blocks, servers)
    average = sum(blocks) / servers
    for block in sorted(range(len(blocks)), key=lambda b: -blocks[b]):
        size = blocks[block]
        if size <= TINY * average:
            at.give(block, int(np.argmin(at.requests)), size)
        elif size <= average:
            at.give(block, _best_fit(at.load, average, size), size)
        else:
            _slice(at, block, size, average)
    return at.done()


def _best_fit(load: NDArray[np.int64], average: float, size: int) -> int:
    left = average - load
    holds = np.where(left >= size, left, np.inf)
    return int(np.argmin(holds)) if np.isfinite(holds).any() else int(np.argmin(load))


def _slice(at: _Servers, block: int, size: int, average: float) -> None:
    for server in np.argsort(at.load, kind="stable").tolist():
        room = int(average - at.load[server])
        if size <= room or room <= 0:
            break
        at.give(block, server, room)
        size -= room
    if size:
        at.give(block, _best_fit(at.load, average, size), size)


def mxnet(blocks: Sequence[int], servers: int) -> Assignment:
    """MXNet's assignment: small blocks are hashed by key, large ones split equally over all servers."""
    at = _Servers(blocks, servers)
    for key, size in enumerate(blocks):
        if size < MXNET_BIG:
            at.give(key, key * MXNET_PRIME % servers, size)
            continue
        edges = [round(size * i / servers) for i in range(servers + 1)]
        for server in range(servers):
            at.give(key, server, edges[server + 1] - edges[server])
    return at.done()


def round_robin(blocks: Sequence[int], servers: int) -> Assignment:
    """TensorFlow's assignment: round robin over the servers, regardless of size."""
    at = _Servers(blocks, servers)
    for key, size in enumerate(blocks):
        at.give(key, key % servers, size)
    return at.done()
