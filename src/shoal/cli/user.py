"""`shoal user`: users, their roles and tickets."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from shoal.cli.lazy import LazyGroup
from shoal.cli.options import on_server, output_option, yes_option
from shoal.cli.out import Output

if TYPE_CHECKING:
    from shoal.client import Client
    from shoal.server.api.models import User

COMMANDS = {
    "ls": ("shoal.cli.user:ls", "List users."),
    "show": ("shoal.cli.user:show", "Show a user."),
    "create": ("shoal.cli.user:create", "Add a user."),
    "set": ("shoal.cli.user:set_", "Change a user's role or tickets."),
    "rm": ("shoal.cli.user:rm", "Remove a user."),
}
GROUP = LazyGroup("user", COMMANDS, "Users, their roles and tickets.")

name_argument = click.argument("name", metavar="NAME", help="Name of the user.")
tickets_option = click.option("--tickets", type=float, help="Weight of the user's claim on the GPUs.")
role_option = click.option("--role", help="viewer, user or admin.")


def _print(found: User | list[User], output: Output) -> None:
    from shoal.cli.columns import print_table
    from shoal.cli.report import print_document
    from shoal.cli.times import ago
    from shoal.server.api.models import UserList

    users = found if isinstance(found, list) else [found]
    if output.for_people:
        rows = [[u.name, u.role.value, f"{u.tickets:g}", f"{ago(u.created_at)} ago"] for u in users]
        print_table(["NAME", "ROLE", "TICKETS", "CREATED"], rows, wide=output is Output.WIDE)
    else:
        document = UserList(items=found, next=None) if isinstance(found, list) else found
        print_document(output, document, [user.name for user in users])


@click.command()
@output_option
@on_server
def ls(client: Client, output: Output) -> None:
    """List users."""
    _print(client.users(), output)


@click.command()
@name_argument
@output_option
@on_server
def show(client: Client, name: str, output: Output) -> None:
    """Show a user."""
    _print(client.user(name), output)


@click.command()
@name_argument
@role_option
@tickets_option
@output_option
@on_server
def create(client: Client, name: str, output: Output, role: str | None, tickets: float | None) -> None:
    """Add a user. Then create a token for the user: shoal token create --user NAME."""
    user = client.create_user(name, role=role or "user", tickets=1.0 if tickets is None else tickets)
    _print(user, output)


@click.command("set")
@name_argument
@role_option
@tickets_option
@output_option
@on_server
def set_(client: Client, name: str, output: Output, role: str | None, tickets: float | None) -> None:
    """Change a user's role or tickets. New tickets count from the next decision, which follows at once."""
    from shoal.core.errors import ShoalError

    if role is None and tickets is None:
        raise ShoalError("give --role or --tickets")
    _print(client.change_user(name, role=role, tickets=tickets), output)


@click.command()
@name_argument
@yes_option
@on_server
def rm(client: Client, name: str, yes: bool) -> None:
    """Remove a user and the user's tokens."""
    from shoal.cli.out import say
    from shoal.cli.several import confirmed

    confirmed(f"Remove user {name}?", yes=yes)
    client.delete_user(name)
    say(f"removed {name}")
