"""Users and groups as decisions see them: read from the store, and compared with what the scheduler knows."""

from __future__ import annotations

from collections.abc import Iterable

from shoal.core.cluster import Cluster, Group, User
from shoal.core.events import PeopleChanged
from shoal.core.limits import Limits
from shoal.server.store.change import Row
from shoal.server.store.store import Store


def limits_of(row: Row) -> Limits:
    """The limits of a user or a group on record."""
    return Limits.from_plain(row["limits"] or {})


def groups_of(store: Store) -> tuple[Group, ...]:
    return tuple(Group(row["name"], row["tickets"], limits_of(row)) for row in store.groups())


def users_of(store: Store, also: Iterable[str] = ()) -> tuple[User, ...]:
    """Users in the order of `also`, then the others. Names that are not on record have one ticket."""
    known = {
        row["name"]: User(row["name"], row["tickets"], limits_of(row), row["group"] or "")
        for row in store.users()
    }
    return tuple(known.get(name) or User(name) for name in dict.fromkeys([*also, *known]))


def changed_people(cluster: Cluster, store: Store) -> list[PeopleChanged]:
    """What the scheduler does not know yet of users and groups: one event, or none."""
    known = {user.name: user for user in cluster.users}
    users = tuple(user for user in users_of(store) if known.get(user.name, User(user.name)) != user)
    groups = groups_of(store)
    return [PeopleChanged(users, groups)] if users or groups != cluster.groups else []
