"""`shoal policy set NAME` and `shoal policy get`: the policy of the running cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.options import Home, Out, Output, Server, TokenFile, policy_names
from shoal.cli.report import reported

if TYPE_CHECKING:
    from shoal.server.models import Policy


@reported
def set_(
    name: Annotated[str, typer.Argument(help="A policy, see shoal policy ls.", autocompletion=policy_names)],
    option: Annotated[
        list[str] | None, typer.Option("--option", help="NAME=value; see shoal policy show.")
    ] = None,
    output: Out = Output.TABLE,
    home: Home = None,
    server: Server = None,
    token_file: TokenFile = None,
) -> None:
    """Change the policy of the running cluster: jobs are resized by it at once, nothing is restarted."""
    from shoal.cli.options import connect
    from shoal.core.errors import ShoalError

    options = {}
    for setting in option or []:
        key, equals, value = setting.partition("=")
        if not equals or not key:
            raise ShoalError(f"--option {setting}: write NAME=value")
        options[key] = value
    with connect(home, server, token_file) as client:
        _print(client.set_policy(name, options), output)


@reported
def get(
    output: Out = Output.TABLE, home: Home = None, server: Server = None, token_file: TokenFile = None
) -> None:
    """The policy in force, and its options."""
    from shoal.cli.options import connect

    with connect(home, server, token_file) as client:
        _print(client.policy(), output)


def _print(policy: Policy, output: Output) -> None:
    from shoal.cli.report import print_document

    if not output.for_people:
        print_document(output, policy, policy.name)
        return
    print(f"{policy.name}: {policy.summary}")
    for key, value in policy.options.items():
        print(f"  {key} = {value}")
