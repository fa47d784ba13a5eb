"""`shoal node join-token`: the short-lived secrets with which machines join."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from shoal.cli.lazy import LazyGroup
from shoal.cli.options import on_server, output_option
from shoal.cli.out import Output

if TYPE_CHECKING:
    from shoal.client import Client

COMMANDS = {
    "create": ("shoal.cli.join_token:create", "Create a token for one machine; it is shown once."),
    "ls": ("shoal.cli.join_token:ls", "List tokens, without their text."),
    "rm": ("shoal.cli.join_token:rm", "Remove a token."),
}
GROUP = LazyGroup("join-token", COMMANDS, "Tokens with which machines join. Each is good for one machine.")


@click.command()
@click.option("--expires", default="1h", help="Lifetime of the token: 10m, 2h.")
@output_option
@on_server
def create(client: Client, output: Output, expires: str) -> None:
    """Create a token. It is printed only once: the server keeps only its hash.

    Example: shoal node join-token create > token; then, on the other machine:
    shoal agent --join ADDRESS --token-file token
    """
    from shoal.cli.out import say
    from shoal.cli.report import print_document
    from shoal.cli.times import seconds

    made = client.create_join_token(expires_in_s=seconds(expires))
    if output.for_people:
        print(made.token)
        say(f"join token {made.id}, for one machine: shoal agent --join {made.address} --token-file FILE")
    else:
        print_document(output, made, made.token)


@click.command()
@output_option
@on_server
def ls(client: Client, output: Output) -> None:
    """List the tokens that have not expired, without their text."""
    from shoal.cli.columns import print_table
    from shoal.cli.report import print_document
    from shoal.server.api.models import JoinTokenList

    tokens = client.join_tokens()
    if not output.for_people:
        print_document(output, JoinTokenList(items=tokens, next=None), [token.id for token in tokens])
        return
    rows = [[t.id, t.expires_at.isoformat(timespec="minutes"), t.used_by or "-"] for t in tokens]
    print_table(["ID", "EXPIRES", "USED BY"], rows, wide=output is Output.WIDE)


@click.command()
@click.argument("token_id", metavar="ID", help="Id of the token.")
@on_server
def rm(client: Client, token_id: str) -> None:
    """Remove a token: nobody can join with it any more. A machine that has joined stays."""
    from shoal.cli.out import say

    client.remove_join_token(token_id)
    say(f"join token {token_id} is removed")
