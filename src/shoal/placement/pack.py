"""Which nodes to take for one request: the kernels that every packing placement uses.

Their input `avail` is the number of GPUs that may be taken on each node (0 if the node is lost, full, or of
another type). They return node indices. Ties go to the lowest index, so the result depends on the input only.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shoal.core.compiled import kernel

IntArray = NDArray[np.int32]


@kernel
def available(free: IntArray, type_of_node: IntArray, gpu_type: int) -> IntArray:
    """Free GPUs on the nodes of one type; 0 on other nodes. Type -1 means any type."""
    avail = np.zeros(len(free), np.int32)
    for node in range(len(free)):
        if free[node] > 0 and (gpu_type < 0 or type_of_node[node] == gpu_type):
            avail[node] = free[node]
    return avail


@kernel
def best_node(avail: IntArray, need: int, rack_of_node: IntArray, near_rack: int) -> int:
    """The node with the fewest free GPUs that holds `need`, preferably in `near_rack`; -1 if there is none."""
    best, best_free, best_near = -1, 0, False
    for node in range(len(avail)):
        if avail[node] < need:
            continue
        near = near_rack < 0 or rack_of_node[node] == near_rack
        if best < 0 or (near and not best_near) or (near == best_near and avail[node] < best_free):
            best, best_free, best_near = node, avail[node], near
            if near and best_free == need:
                break
    return best


@kernel
def _nodes_needed(histogram: IntArray, need: int) -> int:
    """How many nodes, largest first, hold `need`. The histogram counts nodes by available GPUs."""
    nodes = 0
    for size in range(len(histogram) - 1, 0, -1):
        if histogram[size] == 0:
            continue
        take: int = min(histogram[size], (need + size - 1) // size)
        nodes += take
        need -= take * size
        if need <= 0:
            return nodes
    return -1


@kernel
def _best_zone(avail: IntArray, need: int, zone_of_node: IntArray) -> tuple[int, int]:
    """(zone, nodes needed) of the zone that holds `need` on the fewest nodes; ties go to the fullest zone."""
    zones = largest = 0
    for node in range(len(avail)):
        zones = max(zones, zone_of_node[node] + 1)
        largest = max(largest, avail[node])
    histogram = np.zeros((zones, largest + 1), np.int32)
    total = np.zeros(zones, np.int64)
    for node in range(len(avail)):
        histogram[zone_of_node[node], avail[node]] += 1
        total[zone_of_node[node]] += avail[node]
    best, best_nodes = -1, 0
    for zone in range(zones):
        if total[zone] < need:
            continue
        nodes = _nodes_needed(histogram[zone], need)
        if best < 0 or nodes < best_nodes or (nodes == best_nodes and total[zone] < total[best]):
            best, best_nodes = zone, nodes
    return best, best_nodes


@kernel
def narrow(avail: IntArray, need: int, rack_of_node: IntArray, domain_of_node: IntArray) -> IntArray:
    """`avail` restricted to one rack, else to one domain, if that needs no more nodes than the whole cluster."""
    everywhere = np.zeros(len(avail), np.int32)
    _, fewest = _best_zone(avail, need, everywhere)
    zone_of_node = rack_of_node
    zone, nodes = _best_zone(avail, need, rack_of_node)
    if zone < 0 or nodes != fewest:
        zone_of_node = domain_of_node
        zone, nodes = _best_zone(avail, need, domain_of_node)
    if zone < 0 or nodes != fewest:
        zone_of_node, zone = everywhere, 0
    inside = np.zeros(len(avail), np.int32)
    for node in range(len(avail)):
        if zone_of_node[node] == zone:
            inside[node] = avail[node]
    return inside


@kernel
def span(avail: IntArray, need: int, rack_of_node: IntArray, domain_of_node: IntArray) -> IntArray:
    """GPUs to take on each node: as few nodes as possible, in one rack if that needs no more nodes.

    Takes the largest nodes whole, and the rest by best fit. Takes everything if less than `need` is available.
    """
    taken = np.zeros(len(avail), np.int32)
    avail = narrow(avail, need, rack_of_node, domain_of_node)
    while need > 0:
        node = best_node(avail, need, rack_of_node, np.int64(-1))
        if node < 0:
            node = _largest(avail, need)
            if node < 0:
                break
        take = min(need, avail[node])
        taken[node] = take
        avail[node] = 0
        need -= take
    return taken


@kernel
def _largest(avail: IntArray, most: int) -> int:
    """The node with the most available GPUs up to `most`; -1 if there is none."""
    best = -1
    for node in range(len(avail)):
        if 0 < avail[node] <= most and (best < 0 or avail[node] > avail[best]):
            best = node
    return best


@kernel
def choose(
    free: IntArray,
    type_of_node: IntArray,
    gpu_type: int,
    need: int,
    rack_of_node: IntArray,
    domain_of_node: IntArray,
    near_rack: int,
) -> IntArray:
    """Rows (node, GPUs) for `need` more GPUs: one node if possible, else as few nodes as possible."""
    avail = available(free, type_of_node, gpu_type)
    node = best_node(avail, need, rack_of_node, near_rack)
    if node >= 0:
        one = np.empty((1, 2), np.int32)
        one[0, 0], one[0, 1] = node, need
        return one
    taken = span(avail, need, rack_of_node, domain_of_node)
    count = 0
    for gpus in taken:
        count += gpus > 0
    chosen = np.empty((count, 2), np.int32)
    count = 0
    for node in range(len(taken)):
        if taken[node] > 0:
            chosen[count, 0], chosen[count, 1] = node, taken[node]
            count += 1
    return chosen


@kernel
def whole_nodes(
    avail: IntArray, size: IntArray, need: int, rack_of_node: IntArray, domain_of_node: IntArray
) -> IntArray:
    """Take idle nodes whole, largest first, as long as each fits into the rest of `need`."""
    idle = np.zeros(len(avail), np.int32)
    for node in range(len(avail)):
        if avail[node] == size[node]:
            idle[node] = avail[node]
    idle = narrow(idle, need, rack_of_node, domain_of_node)
    taken = np.zeros(len(avail), np.int32)
    while need > 0:
        node = _largest(idle, need)
        if node < 0:
            break
        taken[node] = idle[node]
        need -= idle[node]
        idle[node] = 0
    return taken
