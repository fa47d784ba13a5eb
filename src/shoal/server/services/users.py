"""Users: their roles and tickets."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from shoal.core.events import TicketsChanged
from shoal.server.api.models import Role
from shoal.server.loop.live_job import LiveJob
from shoal.server.services.errors import Conflict, NotFound
from shoal.server.store.store import Row, Store


class Users:
    def __init__(
        self,
        store: Store,
        now_s: Callable[[], float],
        jobs: Mapping[int, LiveJob],
        post: Callable[[TicketsChanged], None],
    ) -> None:
        """`jobs` are the unfinished ones; `post` tells the scheduler of new tickets."""
        self._store, self._now_s, self._jobs, self._post = store, now_s, jobs, post

    def all(self) -> list[Row]:
        return self._store.users()

    def find(self, name: str) -> Row:
        row = self._store.user(name)
        if row is None:
            raise NotFound(f"there is no user {name!r}", "`shoal user ls` lists them")
        return row

    def add(self, name: str, role: Role, tickets: float, actor: str) -> Row:
        if self._store.user(name) is not None:
            raise Conflict(f"there is a user {name!r} already")
        with self._store.change(self._now_s(), actor=actor) as change:
            change.add_user(name, role.value, tickets)
            change.event("user.created", f"{name} ({role.value}) with {tickets:g} tickets")
        self._post(TicketsChanged(name, tickets))
        return self.find(name)

    def change(self, name: str, role: Role | None, tickets: float | None, actor: str) -> Row:
        row = self.find(name)
        if row["role"] == Role.ADMIN.value and role not in (None, Role.ADMIN):
            self._keep_an_admin(name)
        changes = {"role": role.value if role else row["role"], "tickets": tickets or row["tickets"]}
        with self._store.change(self._now_s(), actor=actor) as change:
            change.update_user(name, **changes)
            change.event(
                "user.changed",
                f"{name} is {changes['role']} with {changes['tickets']:g} tickets",
                data=changes,
            )
        if tickets is not None:
            self._post(TicketsChanged(name, tickets))
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

    def _keep_an_admin(self, name: str) -> None:
        if not any(u["role"] == Role.ADMIN.value and u["name"] != name for u in self._store.users()):
            raise Conflict(f"{name} is the only admin; make another one first")
