"""Users and tokens."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path

from shoal.server.api import models as m
from shoal.server.api.routes.common import ERRORS, S, Services, W
from shoal.server.loop.clock import as_time
from shoal.server.services.errors import Conflict, Forbidden, NotFound
from shoal.server.services.users import plain_limits
from shoal.server.store.change import Row

router = APIRouter(tags=["people"], responses=ERRORS)
UserName = Annotated[str, Path(max_length=64, pattern=m.NAME)]


def _user(s: Services, row: Row) -> m.User:
    return m.User(
        name=row["name"],
        role=row["role"],
        tickets=row["tickets"],
        created_at=as_time(row["created_s"]),
        account=row["account"],
        group=row["group"],
        limits=plain_limits(row),
        use=s.limits_use.of([row["name"]]),
        warnings=[
            *s.limits_use.warnings(row, [row["name"]]),
            *s.accounts.warnings(row["name"]),
            *_no_account(s, row),
        ],
    )


def _no_account(s: Services, row: Row) -> list[str]:
    """Why no job of this user can run, if so. Viewers submit none."""
    try:
        if row["role"] != m.Role.VIEWER.value:
            s.accounts.must_have_one(row["name"])
    except Forbidden as error:
        return [str(error)]
    return []


def _group(s: Services, row: Row) -> m.Group:
    users = s.users.members(row["name"])
    return m.Group(
        name=row["name"],
        tickets=row["tickets"],
        created_at=as_time(row["created_s"]),
        limits=plain_limits(row),
        users=users,
        use=s.limits_use.of(users),
        warnings=s.limits_use.warnings(row, users),
    )


@router.get("/users", response_model=m.UserList)
async def list_users(s: S, who: W) -> m.UserList:
    """All users, for admins and viewers; yourself otherwise."""
    return m.UserList(items=[_user(s, r) for r in s.users.all() if who.only in (None, r["name"])])


@router.post("/users", status_code=201, response_model=m.User)
async def add_user(new: m.UserCreate, s: S, who: W) -> m.User:
    who.must_administer()
    s.accounts.check_new(new.account, same_account=new.same_account)
    row = s.users.add(
        new.name, new.role, new.tickets, who.user, same_person=new.same_person, group=new.group, limits=new.limits,
        account=new.account,
    )  # fmt: skip
    return _user(s, row)


@router.get("/users/{user}", response_model=m.User)
async def get_user(user: UserName, s: S, who: W) -> m.User:
    if who.only not in (None, user):
        raise NotFound(f"there is no user {user!r}")
    return _user(s, s.users.find(user))


@router.patch("/users/{user}", response_model=m.User)
async def change_user(user: UserName, change: m.UserChange, s: S, who: W) -> m.User:
    """Change role, tickets, group or limits. The next decision uses them."""
    who.must_administer()
    row = s.users.change(user, change, who.user)
    s.gate.forget()
    return _user(s, row)


@router.delete("/users/{user}", status_code=204)
async def delete_user(user: UserName, s: S, who: W) -> None:
    """Delete a user and their tokens. Their past jobs stay in the store."""
    who.must_administer()
    s.users.delete(user, who.user)
    s.gate.forget()


def _token(row: Row) -> m.Token:
    return m.Token(
        id=row["id"],
        user=row["user"],
        label=row["label"],
        created_at=as_time(row["created_s"]),
        last_used_at=as_time(row["last_used_s"]),
        expires_at=as_time(row["expires_s"]),
    )


@router.get("/groups", response_model=m.GroupList)
async def list_groups(s: S, who: W) -> m.GroupList:
    """All groups, for admins and viewers; your own otherwise."""
    mine = None if who.only is None else s.users.find(who.only)["group"]
    rows = [r for r in s.users.groups() if who.only is None or r["name"] == mine]
    return m.GroupList(items=[_group(s, r) for r in rows])


@router.post("/groups", status_code=201, response_model=m.Group)
async def add_group(new: m.GroupCreate, s: S, who: W) -> m.Group:
    who.must_administer()
    return _group(s, s.users.add_group(new, who.user))


@router.get("/groups/{group}", response_model=m.Group)
async def get_group(group: UserName, s: S, who: W) -> m.Group:
    if who.only is not None and s.users.find(who.only)["group"] != group:
        raise NotFound(f"there is no group {group!r}")
    return _group(s, s.users.find_group(group))


@router.patch("/groups/{group}", response_model=m.Group)
async def change_group(group: UserName, change: m.GroupChange, s: S, who: W) -> m.Group:
    """Change tickets or limits. The next decision uses them."""
    who.must_administer()
    return _group(s, s.users.change_group(group, change, who.user))


@router.delete("/groups/{group}", status_code=204)
async def delete_group(group: UserName, s: S, who: W) -> None:
    """Delete a group that has no users."""
    who.must_administer()
    s.users.delete_group(group, who.user)


@router.get("/tokens", response_model=m.TokenList)
async def list_tokens(s: S, who: W) -> m.TokenList:
    """Your own tokens, or all for admins. The tokens themselves are not shown."""
    only = None if who.role is m.Role.ADMIN else who.user
    return m.TokenList(items=[_token(r) for r in s.tokens.of(only)])


@router.post("/tokens", status_code=201, response_model=m.TokenCreated)
async def add_token(new: m.TokenCreate, s: S, who: W) -> m.TokenCreated:
    """Make a token. Only this answer contains it. It expires no later than the token that makes it."""
    who.must_change()
    user = new.user or who.user
    if user != who.user and who.role is not m.Role.ADMIN:
        raise Forbidden("only an admin may make tokens for others")
    s.users.find(user)
    row, token = s.tokens.add(user, new.label, new.expires_in_s, who.user, latest_s=who.expires_s)
    s.gate.forget()
    return m.TokenCreated(**_token(row).model_dump(), token=token)


@router.delete("/tokens/{token}", status_code=204)
async def delete_token(token: Annotated[int, Path(ge=1, le=10**15)], s: S, who: W) -> None:
    """Revoke a token."""
    only = None if who.role is m.Role.ADMIN else who.user
    if not any(r["id"] == token for r in s.tokens.of(only)):
        raise NotFound(f"there is no token {token}")
    if token == who.token:
        raise Conflict("this is the token you are using; delete it with another one")
    s.tokens.delete(token, who.user)
    s.gate.forget()
