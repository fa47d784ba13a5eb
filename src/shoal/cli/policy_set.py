"""`shoal policy set NAME` and `shoal policy get`: the policy of the running cluster."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import click

from shoal.cli.options import on_server, output_option, policy_names
from shoal.cli.out import Output

if TYPE_CHECKING:
    from shoal.client import Client
    from shoal.server.api.models import Policy


@click.command("set")
@click.argument(
    "name",
    metavar="NAME",
    shell_complete=policy_names,
    help="Name of a policy; `shoal policy ls` lists them.",
)
@click.option(
    "--option", multiple=True, help="NAME=value; `shoal policy show` lists the options. Repeat for more."
)
@output_option
@on_server
def set_(client: Client, name: str, output: Output, option: tuple[str, ...]) -> None:
    """Change the policy of the running cluster. It resizes jobs at once; nothing restarts."""
    from shoal.core.errors import ShoalError

    options = {}
    for setting in option:
        key, equals, value = setting.partition("=")
        if not equals or not key:
            raise ShoalError(f"--option {setting}: write NAME=value")
        options[key] = value
    _print(client.set_policy(name, options), output, only=options)


@click.command()
@output_option
@on_server
def get(client: Client, output: Output) -> None:
    """Show the policy of the running cluster, and its options."""
    _print(client.policy(), output)


def _print(policy: Policy, output: Output, only: Collection[str] | None = None) -> None:
    """Print the policy with its options, or with `only` these."""
    from shoal.cli.policy_show import shown
    from shoal.cli.report import print_document

    if not output.for_people:
        print_document(output, policy, policy.name)
        return
    print(f"{policy.name}: {policy.summary}")
    for key, value in policy.options.items():
        if only is None or key in only:
            print(f"  {key} = {shown(value)}")
