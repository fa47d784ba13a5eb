"""Under which account of the machines the jobs of a user run.

A server that runs as root runs each job under the account of its owner, and users without an account get no job. Any
other server can run jobs on its own machine only under its own account: then all users can read each other's files, and
each other user must be added with that in mind. On other machines the agent decides: one that runs as root changes to
the account, and refuses jobs of users that have none.
"""

from __future__ import annotations

import os
import pwd

from shoal.executors import hidden
from shoal.executors.accounts import find_account
from shoal.executors.base import NamedAccount, OwnAccount, RunAs
from shoal.server.api import models as m
from shoal.server.api.models import Role
from shoal.server.services.errors import Conflict, Forbidden, Invalid
from shoal.server.store.change import Row
from shoal.server.store.store import Store


class Accounts:
    def __init__(
        self, store: Store, *, enforced: bool, own_gpus: bool = True, is_root: bool | None = None
    ) -> None:
        """`enforced` is False for an executor that starts no processes. `own_gpus`: jobs run on this machine, too."""
        self._store, self._enforced, self._own_gpus = store, enforced, own_gpus
        self._is_root = os.geteuid() == 0 if is_root is None else is_root

    @property
    def separate(self) -> bool:
        """Whether jobs run under the accounts of their owners."""
        return self._enforced and self._is_root

    def of(self, user: str) -> RunAs:
        """The account for the jobs of this user. An executor that runs as root may refuse it."""
        row = self._store.user(user)
        if self._enforced and row is not None and row["account"] is not None:
            return NamedAccount(str(row["account"]))
        is_admin = row is not None and row["role"] == Role.ADMIN.value
        # The admin of a server that is not root is anybody who runs a job there: that must not lead to root elsewhere.
        return OwnAccount(may_be_root=is_admin and self._is_root, shared=not is_admin)

    def check_new(self, account: str | None, *, same_account: bool) -> None:
        """Refuse a new user whose jobs would run where nobody expects it."""
        if not self._enforced:
            return
        own = pwd.getpwuid(os.geteuid()).pw_name
        if account is not None:
            self.check(account)
        elif self._is_root and same_account:
            raise Invalid(
                "same_account: this server runs as root, and so would the jobs of this user; give the account of the "
                "user: --account NAME",
                "same_account",
            )
        elif not self._is_root and not same_account:
            raise Conflict(
                f"this server does not run as root, so the jobs of all users run under the account {own!r}: they can "
                "read each other's files, secrets and tokens, and the admin's"
                + ("" if hidden.why_not() else ", unless the server hides them (docs/accounts.md)"),
                "confirm that with --same-account, or run the server as root and give each user an --account",
            )

    def check(self, account: str) -> None:
        """Refuse an account under which no job could run."""
        if not self._enforced or (not self._is_root and not self._own_gpus):
            return  # the machines of agents may have it, and agents that run as root can change to it
        try:
            find_account(account)
        except OSError as error:
            what = f"{error.strerror}" if self._is_root else f"the server cannot use it: {error.strerror}"
            raise Invalid(f"account: {what}", "account") from None

    def must_have_one(self, user: str) -> None:
        """Refuse a job whose owner has no account to run it under."""
        row = self._store.user(user)
        if self.separate and row is not None and row["account"] is None and row["role"] != Role.ADMIN.value:
            raise Forbidden(
                f"user {user} has no account on the machines, so no job can run for them; "
                f"an admin sets one: shoal user set {user} --account NAME"
            )

    def warnings(self, user: str) -> list[str]:
        """What is wrong with the account of this user."""
        return _shared(self._store.users(), user) if self._enforced else []

    def of_described(self, users: list[str]) -> str | None:
        """What is to be said when users of a cluster file were added, which names no accounts."""
        if not self._enforced:
            return None
        names = ", ".join(users[:5]) + (", ..." if len(users) > 5 else "")
        if self._is_root:
            text = f"users of the cluster file get no job until they have an account ({names})"
            return f"{text}: shoal user set NAME --account NAME"
        own = pwd.getpwuid(os.geteuid()).pw_name
        return f"users of the cluster file ({names}) share the account {own!r}: their jobs can read each other's files"

    def doctor(self) -> m.Check | None:
        users = self._store.users()
        if not self._enforced:
            return None
        if self._is_root:
            return _of_root(users)
        own = pwd.getpwuid(os.geteuid()).pw_name
        if len(users) < 2:
            text = f"jobs run under the account {own!r}, like the server"
            return m.Check(name="accounts", status="ok", message=text)
        text = f"the jobs of all {len(users)} users run under the account {own!r}: they can "
        text += (
            f"read each other's files, also tokens ({why})"
            if (why := hidden.why_not())
            else ("read the account's files; those of the server are hidden from them")
        )
        hint = "run the server as root and give each user an account (docs/accounts.md)"
        return m.Check(name="accounts", status="warning", message=text, hint=hint)


def _shared(users: list[Row], user: str) -> list[str]:
    """Users who share an account, or use root's, can read and change what the others' jobs can."""
    account = next((u["account"] for u in users if u["name"] == user), None)
    others = [u["name"] for u in users if u["account"] == account and u["name"] != user]
    found = []
    if account is not None and others:
        text = f"{user} shares the account {account!r} with {', '.join(others[:5])}"
        found.append(f"{text}: they can read each other's files and secrets")
    if account is not None and _is_root(account):
        found.append(f"the jobs of {user} run as root and can read everything, also the tokens of all users")
    return found


def _is_root(account: str) -> bool:
    try:
        return pwd.getpwnam(account).pw_uid == 0
    except KeyError:  # it is not on this machine
        return False


def _of_root(users: list[Row]) -> m.Check:
    without = [u["name"] for u in users if u["account"] is None and u["role"] != Role.ADMIN.value]
    if without:
        text = f"{', '.join(without[:5])} without an account of the machine: they get no job"
        hint = f"shoal user set {without[0]} --account NAME"
        return m.Check(name="accounts", status="warning", message=text, hint=hint)
    shared = {u["name"]: found for u in users if (found := _shared(users, u["name"]))}
    if shared:
        user, (text, *_) = next(iter(shared.items()))
        hint = f"give each user an account of their own: shoal user set {user} --account NAME"
        return m.Check(name="accounts", status="warning", message=text, hint=hint)
    return m.Check(name="accounts", status="ok", message="jobs run under the accounts of their owners")
