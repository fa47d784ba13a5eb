"""`shoal user`: who may use the cluster, and the weight of their claim."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.lazy import LazyGroup
from shoal.cli.options import Home, Out, Output, Server, TokenFile, Yes
from shoal.cli.report import reported

if TYPE_CHECKING:
    from shoal.server.models import User

COMMANDS = {
    "ls": ("shoal.cli.user:ls", "The users."),
    "show": ("shoal.cli.user:show", "One user."),
    "create": ("shoal.cli.user:create", "Add a user."),
    "set": ("shoal.cli.user:set_", "Change a user's role or tickets."),
    "rm": ("shoal.cli.user:rm", "Remove a user."),
}
HEAD = ["NAME", "ROLE", "TICKETS", "CREATED"]
GROUP = LazyGroup("user", COMMANDS, "Users: who may use the cluster, and the weight of their claim.")

UserName = Annotated[str, typer.Argument(metavar="NAME", help="Name of the user.")]
Tickets = Annotated[float | None, typer.Option(help="The weight of their claim on the GPUs.")]
RoleName = Annotated[str | None, typer.Option(help="viewer, user or admin.")]


def _row(user: User) -> list[str]:
    from shoal.cli.times import ago

    return [user.name, user.role.value, f"{user.tickets:g}", f"{ago(user.created_at)} ago"]


def _print(user: User, output: Output) -> None:
    from shoal.cli.columns import print_table
    from shoal.cli.report import print_document

    if output.for_people:
        print_table(HEAD, [_row(user)])
    else:
        print_document(output, user, user.name)


@reported
def ls(
    output: Out = Output.TABLE, home: Home = None, server: Server = None, token_file: TokenFile = None
) -> None:
    """The users."""
    from shoal.cli.columns import print_table
    from shoal.cli.options import connect
    from shoal.cli.report import print_document
    from shoal.server.models import UserList

    with connect(home, server, token_file) as client:
        users = client.users()
    if output.for_people:
        print_table(HEAD, [_row(user) for user in users], wide=output is Output.WIDE)
    else:
        print_document(output, UserList(items=users, next=None), [user.name for user in users])


@reported
def show(
    name: UserName,
    output: Out = Output.TABLE,
    home: Home = None,
    server: Server = None,
    token_file: TokenFile = None,
) -> None:
    """One user."""
    from shoal.cli.options import connect

    with connect(home, server, token_file) as client:
        _print(client.user(name), output)


@reported
def create(
    name: UserName,
    role: RoleName = None,
    tickets: Tickets = None,
    output: Out = Output.TABLE,
    home: Home = None,
    server: Server = None,
    token_file: TokenFile = None,
) -> None:
    """Add a user. Then give them a token: shoal token create --user NAME."""
    from shoal.cli.options import connect

    with connect(home, server, token_file) as client:
        user = client.create_user(name, role=role or "user", tickets=1.0 if tickets is None else tickets)
        _print(user, output)


@reported
def set_(
    name: UserName,
    role: RoleName = None,
    tickets: Tickets = None,
    output: Out = Output.TABLE,
    home: Home = None,
    server: Server = None,
    token_file: TokenFile = None,
) -> None:
    """Change a user's role or tickets; tickets count from the next decision, which is now."""
    from shoal.cli.options import connect
    from shoal.core.errors import ShoalError

    if role is None and tickets is None:
        raise ShoalError("give --role or --tickets")
    with connect(home, server, token_file) as client:
        _print(client.change_user(name, role=role, tickets=tickets), output)


@reported
def rm(
    name: UserName, yes: Yes = False, home: Home = None, server: Server = None, token_file: TokenFile = None
) -> None:
    """Remove a user and their tokens."""
    from shoal.cli.options import connect
    from shoal.cli.out import say
    from shoal.cli.several import confirmed

    with connect(home, server, token_file) as client:
        confirmed(f"Remove user {name}?", yes=yes)
        client.delete_user(name)
    say(f"removed {name}")
