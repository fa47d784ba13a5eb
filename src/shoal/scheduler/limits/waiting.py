"""Whether a user may submit more jobs: limits of waiting jobs."""

from __future__ import annotations

from collections.abc import Mapping

from shoal.core.cluster import Cluster
from shoal.core.words import counted


def refusal(cluster: Cluster, user: str, waiting: Mapping[str, int], more: int = 1) -> str | None:
    """Why `more` jobs of this user are refused; None if they are not. `waiting`: jobs without GPUs by user."""
    owner = next((u for u in cluster.users if u.name == user), None)
    if owner is None:
        return None
    holders = [(f"user {user}", owner.limits.max_waiting_jobs, [user])]
    for group in cluster.groups:
        if group.name == owner.group:
            members = [u.name for u in cluster.users if u.group == group.name]
            holders.append((f"group {group.name}", group.limits.max_waiting_jobs, members))
    for holder, most, members in holders:
        now = sum(waiting.get(name, 0) for name in members)
        if most is not None and now + more > most:
            return (
                f"the limit of {holder} is {counted(most, 'waiting job')}, and {now} "
                f"{'waits' if now == 1 else 'wait'} already: submit {'fewer, or ' if more > 1 else ''}later, "
                "or ask an admin to raise max_waiting_jobs"
            )
    return None
