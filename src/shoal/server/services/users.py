"""Users and groups: roles, tickets and limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from shoal.core.cluster import Cluster
from shoal.core.events import PeopleChanged
from shoal.core.limits import Limits
from shoal.server.api import models as m
from shoal.server.api.models import Role
from shoal.server.loop.live_job import LiveJob
from shoal.server.loop.people import groups_of, limits_of, users_of
from shoal.server.services.accounts import Accounts
from shoal.server.services.errors import Conflict, NotFound
from shoal.server.store import tables as t
from shoal.server.store.change import Row
from shoal.server.store.store import Store


class Users:
    def __init__(
        self,
        store: Store,
        now_s: Callable[[], float],
        jobs: Mapping[int, LiveJob],
        cluster: Callable[[], Cluster],
        post: Callable[[PeopleChanged], None],
        accounts: Accounts,
    ) -> None:
        """`jobs` are the unfinished ones; `cluster` is the scheduler's, and `post` tells it of changes."""
        self._store, self._now_s, self._jobs = store, now_s, jobs
        self._cluster, self._post, self._accounts = cluster, post, accounts

    def all(self) -> list[Row]:
        return self._store.users()

    def find(self, name: str) -> Row:
        row = self._store.user(name)
        if row is None:
            raise NotFound(f"there is no user {name!r}", "`shoal user ls` lists them")
        return row

    def add(
        self,
        name: str,
        role: Role,
        tickets: float,
        actor: str,
        *,
        same_person: bool = False,
        group: str | None = None,
        limits: m.Limits | None = None,
        account: str | None = None,
    ) -> Row:
        if self._store.user(name) is not None:
            raise Conflict(f"there is a user {name!r} already")
        if not same_person and self._store.has_jobs_of(name):
            raise Conflict(
                f"a deleted user {name!r} has jobs on record, and the new one could read their logs",
                "choose another name, or confirm with --same-person that it is the same person",
            )
        if group:
            self.find_group(group)
        kept = self._changed_limits({}, limits)
        with self._store.change(self._now_s(), actor=actor) as change:
            change.add_user(name, role.value, tickets, group=group or None, limits=kept, account=account)
            change.event("user.created", f"{name} ({role.value}) with {tickets:g} tickets")
        self._tell()
        return self.find(name)

    def change(self, name: str, change: m.UserChange, actor: str) -> Row:
        row = self.find(name)
        role, tickets = change.role, change.tickets
        if row["role"] == Role.ADMIN.value and role not in (None, Role.ADMIN):
            self._keep_an_admin(name)
        if change.group:
            self.find_group(change.group)
        group = row["group"] if change.group is None else change.group or None
        changes = {
            "role": role.value if role else row["role"],
            "tickets": tickets or row["tickets"],
            "group": group,
            "limits": self._changed_limits(row["limits"] or {}, change.limits),
            "account": row["account"] if change.account is None else change.account,
        }
        if change.account is not None:
            self._accounts.check(change.account)
        with self._store.change(self._now_s(), actor=actor) as record:
            record.update_user(name, **changes)
            text = f"{name} is {changes['role']} with {changes['tickets']:g} tickets"
            text += f" in group {group}" if group else ""
            record.event("user.changed", text, data=changes)
        self._tell()
        return self.find(name)

    def delete(self, name: str, actor: str) -> None:
        """Delete a user and their tokens. Their past jobs stay on record."""
        if self.find(name)["role"] == Role.ADMIN.value:
            self._keep_an_admin(name)
        if any(j.user == name for j in self._jobs.values()):
            raise Conflict(f"{name} has unfinished jobs; cancel them first")
        with self._store.change(self._now_s(), actor=actor) as change:
            change.delete_user(name)
            change.event("user.deleted", f"{name} and their tokens are gone")
        self._tell()

    def _keep_an_admin(self, name: str) -> None:
        if not any(u["role"] == Role.ADMIN.value and u["name"] != name for u in self._store.users()):
            raise Conflict(f"{name} is the only admin; make another one first")

    # -- groups ------------------------------------------------------------------------------------

    def groups(self) -> list[Row]:
        return self._store.groups()

    def find_group(self, name: str) -> Row:
        row = next((g for g in self._store.groups() if g["name"] == name), None)
        if row is None:
            raise NotFound(f"there is no group {name!r}", "`shoal group ls` lists them")
        return row

    def members(self, group: str) -> list[str]:
        return [u["name"] for u in self._store.users() if u["group"] == group]

    def add_group(self, new: m.GroupCreate, actor: str) -> Row:
        if any(g["name"] == new.name for g in self._store.groups()):
            raise Conflict(f"there is a group {new.name!r} already")
        limits = self._changed_limits({}, new.limits)
        with self._store.change(self._now_s(), actor=actor) as change:
            change.insert(t.groups, name=new.name, tickets=new.tickets, limits=limits)
            change.event("group.created", new.name, data={"tickets": new.tickets, "limits": limits})
        self._tell()
        return self.find_group(new.name)

    def change_group(self, name: str, change: m.GroupChange, actor: str) -> Row:
        row = self.find_group(name)
        limits = self._changed_limits(row["limits"] or {}, change.limits)
        tickets = change.tickets if "tickets" in change.model_fields_set else row["tickets"]
        values = {"tickets": tickets, "limits": limits}
        with self._store.change(self._now_s(), actor=actor) as record:
            record.update(t.groups, name, **values)
            record.event("group.changed", name, data=values)
        self._tell()
        return self.find_group(name)

    def delete_group(self, name: str, actor: str) -> None:
        self.find_group(name)
        members = self.members(name)
        if members:
            first = members[0]
            raise Conflict(
                f"{', '.join(members)} {'is' if len(members) == 1 else 'are'} in group {name}",
                f"move them first: shoal user set {first} --group none",
            )
        with self._store.change(self._now_s(), actor=actor) as change:
            change.delete(t.groups, t.groups.c.name == name)
            change.event("group.deleted", name)
        self._tell()

    def _changed_limits(self, before: dict[str, Any], given: m.Limits | None) -> dict[str, Any]:
        """The limits after a change: those that were not given stay, and null removes one."""
        if given is None:
            return before
        values = given.model_dump(include=given.model_fields_set)
        if values.get("max_gpus_of_type") is not None:
            values["max_gpus_of_type"] = self._changed_types(
                before.get("max_gpus_of_type") or {}, values["max_gpus_of_type"]
            )
        return Limits.from_plain({**before, **values}).plain()

    def _changed_types(self, before: dict[str, int], given: dict[str, int | None]) -> dict[str, int]:
        for word, most in given.items():
            if most is not None:
                self._cluster().type_index(word)  # raises with a hint if no node has GPUs of this type
        return {word: most for word, most in {**before, **given}.items() if most is not None}

    def _tell(self) -> None:
        # All users, not only those who differ: the scheduler may not know the last change yet.
        self._post(PeopleChanged(users_of(self._store), groups_of(self._store)))


def plain_limits(row: Row) -> m.Limits:
    """The limits of a user or group on record, as the API shows them."""
    return m.Limits.model_validate(limits_of(row).plain())
