"""`shoal group`: groups of users, with tickets and limits of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from shoal.cli.lazy import LazyGroup
from shoal.cli.limit_options import given_limits, limit_options, shown
from shoal.cli.options import on_server, output_option, yes_option
from shoal.cli.out import Output

if TYPE_CHECKING:
    from shoal.client import Client
    from shoal.server.api.models import Group

COMMANDS = {
    "ls": ("shoal.cli.group:ls", "List groups, their users and limits."),
    "show": ("shoal.cli.group:show", "Show a group."),
    "create": ("shoal.cli.group:create", "Add a group."),
    "set": ("shoal.cli.group:set_", "Change a group's tickets or limits."),
    "rm": ("shoal.cli.group:rm", "Remove a group that has no users."),
}
GROUP = LazyGroup("group", COMMANDS, "Groups of users. Limits of a group hold for its users together.")

name_argument = click.argument("name", metavar="NAME", help="Name of the group.")
tickets_option = click.option(
    "--tickets", help="Divided among the users of the group who have jobs; none: each has their own."
)


def _print(found: Group | list[Group], output: Output) -> None:
    from shoal.cli.columns import print_table
    from shoal.cli.out import say
    from shoal.cli.report import print_document
    from shoal.server.api.models import GroupList

    groups = found if isinstance(found, list) else [found]
    if not output.for_people:
        document = GroupList(items=found, next=None) if isinstance(found, list) else found
        print_document(output, document, [group.name for group in groups])
        return
    if not groups:
        say("no groups; shoal group create adds one")
        return
    rows = [
        [
            g.name,
            "-" if g.tickets is None else f"{g.tickets:g}",
            ", ".join(g.users) or "-",
            shown(g.limits, g.use),
        ]
        for g in groups
    ]
    print_table(["NAME", "TICKETS", "USERS", "LIMITS"], rows, wide=output is Output.WIDE)
    for warning in dict.fromkeys(w for g in groups for w in g.warnings):
        say(f"warning: {warning}")


@click.command()
@output_option
@on_server
def ls(client: Client, output: Output) -> None:
    """List groups, their users and limits."""
    _print(client.groups(), output)


@click.command()
@name_argument
@output_option
@on_server
def show(client: Client, name: str, output: Output) -> None:
    """Show a group."""
    _print(client.group(name), output)


@click.command()
@name_argument
@tickets_option
@limit_options
@output_option
@on_server
def create(client: Client, name: str, output: Output, tickets: str | None, **limits: Any) -> None:
    """Add a group. Then put users into it: shoal user set USER --group NAME."""
    made = client.create_group(name, tickets=_tickets(tickets), limits=given_limits(**limits))
    _print(made, output)


@click.command("set")
@name_argument
@tickets_option
@limit_options
@output_option
@on_server
def set_(client: Client, name: str, output: Output, tickets: str | None, **limits: Any) -> None:
    """Change a group's tickets or limits. They count from the next decision, which follows at once."""
    from shoal.core.errors import ShoalError

    given = given_limits(**limits)
    if tickets is None and given is None:
        raise ShoalError("give --tickets or a limit such as --max-gpus")
    change: dict[str, Any] = {} if tickets is None else {"tickets": _tickets(tickets)}
    _print(client.change_group(name, **change, **({} if given is None else {"limits": given})), output)


@click.command()
@name_argument
@yes_option
@on_server
def rm(client: Client, name: str, yes: bool) -> None:
    """Remove a group that has no users."""
    from shoal.cli.out import say
    from shoal.cli.several import confirmed

    confirmed(f"Remove group {name}?", yes=yes)
    client.delete_group(name)
    say(f"removed {name}")


def _tickets(text: str | None) -> float | None:
    from shoal.core.errors import ShoalError

    if text in (None, "none"):
        return None
    try:
        return float(str(text))
    except ValueError:
        raise ShoalError(f"--tickets {text}: write a number, or none") from None
