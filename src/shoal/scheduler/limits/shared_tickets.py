"""The tickets of users whose group has tickets: the members who have jobs divide them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from shoal.core.cluster import Cluster, User


def with_shared_tickets(cluster: Cluster, active: Collection[int]) -> tuple[User, ...]:
    """The users with the tickets that count while the users with these indexes have jobs."""
    shared = {g.name: g.tickets for g in cluster.groups if g.tickets is not None}
    own = dict.fromkeys(shared, 0.0)
    for index in active:
        user = cluster.users[index]
        if user.group in own:
            own[user.group] += user.tickets

    def tickets(index: int, user: User) -> float:
        whole = shared.get(user.group)
        if whole is None:
            return user.tickets
        # A member without jobs gets the part that it would have with them.
        others = own[user.group] - (user.tickets if index in active else 0.0)
        return whole * user.tickets / (others + user.tickets)

    return tuple(
        replace(u, tickets=tickets(i, u)) if u.group in shared else u for i, u in enumerate(cluster.users)
    )
