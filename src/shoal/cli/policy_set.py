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
@click.argument("name", metavar="NAME", shell_complete=policy_names, help="A policy, see shoal policy ls.")
@click.option("--option", multiple=True, help="NAME=value; see shoal policy show.")
@output_option
@on_server
def set_(client: Client, name: str, output: Output, option: tuple[str, ...]) -> None:
    """Change the policy of the running cluster: jobs are resized by it at once, nothing is restarted."""
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
    """The policy in force, and its options."""
    _print(client.policy(), output)


def _print(policy: Policy, output: Output, only: Collection[str] | None = None) -> None:
    """With its options, or those that were given."""
    from shoal.cli.policy_show import shown
    from shoal.cli.report import print_document

    if not output.for_people:
        print_document(output, policy, policy.name)
        return
    print(f"{policy.name}: {policy.summary}")
    for key, value in policy.options.items():
        if only is None or key in only:
            print(f"  {key} = {shown(value)}")
