"""`shoal user`: users, their roles, tickets and limits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from shoal.cli.lazy import LazyGroup
from shoal.cli.limit_options import given_limits, limit_options, shown
from shoal.cli.options import on_server, output_option, yes_option
from shoal.cli.out import Output

if TYPE_CHECKING:
    from shoal.client import Client
    from shoal.server.api.models import User

COMMANDS = {
    "ls": ("shoal.cli.user:ls", "List users."),
    "show": ("shoal.cli.user:show", "Show a user."),
    "create": ("shoal.cli.user:create", "Add a user."),
    "set": ("shoal.cli.user:set_", "Change a user's role, tickets, group or limits."),
    "rm": ("shoal.cli.user:rm", "Remove a user."),
}
GROUP = LazyGroup("user", COMMANDS, "Users, their roles, tickets and limits.")

name_argument = click.argument("name", metavar="NAME", help="Name of the user.")
tickets_option = click.option("--tickets", type=float, help="Weight of the user's claim on the GPUs.")
group_option = click.option("--group", help="Group of the user; none for no group.")
role_option = click.option("--role", help="viewer, user or admin.")


def _print(found: User | list[User], output: Output) -> None:
    from shoal.cli.columns import print_table
    from shoal.cli.out import say
    from shoal.cli.report import print_document
    from shoal.cli.times import ago
    from shoal.server.api.models import UserList

    users = found if isinstance(found, list) else [found]
    if output.for_people:
        rows = [
            [
                u.name,
                u.role.value,
                u.account or "-",
                f"{u.tickets:g}",
                u.group or "-",
                ago(u.created_at),
                shown(u.limits, u.use),
            ]
            for u in users
        ]
        print_table(
            ["NAME", "ROLE", "ACCOUNT", "TICKETS", "GROUP", "AGE", "LIMITS"], rows, wide=output is Output.WIDE
        )
        for warning in dict.fromkeys(w for u in users for w in u.warnings):
            say(f"warning: {warning}")
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
@group_option
@limit_options
@click.option("--account", help="Account of the machines under which the user's jobs run.")
@click.option(
    "--same-account",
    is_flag=True,
    help="The server does not run as root: the user's jobs share its account, and can read all its files.",
)
@click.option("--same-person", is_flag=True, help="The user had this name before and may see the old jobs.")
@output_option
@on_server
def create(
    client: Client,
    name: str,
    output: Output,
    role: str | None,
    tickets: float | None,
    group: str | None,
    account: str | None,
    same_account: bool,
    same_person: bool,
    **limits: Any,
) -> None:
    """Add a user. Then create a token for the user: shoal token create --user NAME."""
    user = client.create_user(
        name,
        role=role or "user",
        tickets=1.0 if tickets is None else tickets,
        same_person=same_person,
        account=account,
        same_account=same_account,
        group=group,
        limits=given_limits(**limits),
    )
    _print(user, output)


@click.command("set")
@name_argument
@role_option
@tickets_option
@group_option
@limit_options
@click.option("--account", help="Account of the machines under which the user's jobs run from now on.")
@output_option
@on_server
def set_(
    client: Client,
    name: str,
    output: Output,
    role: str | None,
    tickets: float | None,
    group: str | None,
    account: str | None,
    **limits: Any,
) -> None:
    """Change a user's role, tickets, group, limits or account. They count from the next decision, at once."""
    from shoal.core.errors import ShoalError

    given = given_limits(**limits)
    if role is None and tickets is None and group is None and given is None and account is None:
        raise ShoalError("give --role, --tickets, --group, --account or a limit such as --max-gpus")
    group = "" if group == "none" else group
    _print(
        client.change_user(name, role=role, tickets=tickets, group=group, limits=given, account=account),
        output,
    )


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
