"""`shoal policy set NAME` and `shoal policy get`: the policy of the running cluster."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.on_server import on_server
from shoal.cli.options import Output, policy_names

if TYPE_CHECKING:
    from shoal.client import Client
    from shoal.server.api.models import Policy


@on_server
def set_(
    client: Client,
    name: Annotated[str, typer.Argument(help="A policy, see shoal policy ls.", autocompletion=policy_names)],
    output: Output,
    option: Annotated[
        list[str] | None, typer.Option("--option", help="NAME=value; see shoal policy show.")
    ] = None,
) -> None:
    """Change the policy of the running cluster: jobs are resized by it at once, nothing is restarted."""
    from shoal.core.errors import ShoalError

    options = {}
    for setting in option or []:
        key, equals, value = setting.partition("=")
        if not equals or not key:
            raise ShoalError(f"--option {setting}: write NAME=value")
        options[key] = value
    _print(client.set_policy(name, options), output, only=options)


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
