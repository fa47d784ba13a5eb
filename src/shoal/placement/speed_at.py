"""How fast a job runs with its share at a placement: one rule for the simulator and for whoever moves jobs.

A profile that was measured by nodes tells it itself. What a parameter-server job without one loses by its place
is known for some models (`ps_speed`).
"""

from __future__ import annotations

from shoal.core.plan import Placement
from shoal.core.profile import Profile
from shoal.placement.ps_speed import slowdown


def speed_at(
    profile: Profile, gpu_type: str, gpus: int, placement: Placement, servers: int = 0, *, apart: bool = False
) -> float:
    """Iterations per second; without a placement as packed. `apart`: servers are on a node of their own."""
    if not servers or (profile.by_servers is None and profile.tells_nodes):
        return profile.speed(gpu_type, gpus, len(placement))
    if profile.by_servers is None:
        rate = profile.speed(gpu_type, gpus)
    else:
        table = profile.by_servers
        rate = float(table[min(servers, table.shape[0]) - 1, min(gpus, table.shape[1]) - 1])
    return rate / slowdown(profile.model, placement, servers, apart=apart) if placement else rate
