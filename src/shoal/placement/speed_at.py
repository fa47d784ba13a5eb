"""The speed of a job at a placement. The simulator and the moving placer share this rule.

A profile measured by number of nodes gives the speed directly. For a parameter-server job without such a
profile, `ps_speed` knows the slowdown by placement for some models.
"""

from __future__ import annotations

from shoal.core.plan import Placement
from shoal.core.profile import Profile
from shoal.placement.ps_speed import slowdown


def speed_at(
    profile: Profile, gpu_type: str, gpus: int, placement: Placement, servers: int = 0, *, apart: bool = False
) -> float:
    """Iterations per second, packed if `placement` is empty. `apart`: servers have a node of their own."""
    if not servers or (profile.by_servers is None and profile.tells_nodes):
        return profile.speed(gpu_type, gpus, len(placement))
    if profile.by_servers is None:
        rate = profile.speed(gpu_type, gpus)
    else:
        table = profile.by_servers
        rate = float(table[min(servers, table.shape[0]) - 1, min(gpus, table.shape[1]) - 1])
    return rate / slowdown(profile.model, placement, servers, apart=apart) if placement else rate
