"""`shoal token`: the tokens that authenticate users and programs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from shoal.cli.lazy import LazyGroup
from shoal.cli.options import on_server, output_option
from shoal.cli.out import Output

if TYPE_CHECKING:
    from shoal.client import Client

COMMANDS = {
    "ls": ("shoal.cli.token:ls", "List tokens, without their text."),
    "create": ("shoal.cli.token:create", "Create a token; it is shown once."),
    "rm": ("shoal.cli.token:rm", "Revoke a token."),
}
GROUP = LazyGroup("token", COMMANDS, "Tokens, which authenticate users and programs.")


@click.command()
@output_option
@on_server
def ls(client: Client, output: Output) -> None:
    """List your tokens (all tokens for admins), without their text."""
    from shoal.cli.columns import print_table
    from shoal.cli.report import print_document
    from shoal.cli.times import ago
    from shoal.server.api.models import TokenList

    tokens = client.tokens()
    if not output.for_people:
        print_document(output, TokenList(items=tokens, next=None), [str(token.id) for token in tokens])
        return
    rows = [
        [
            str(t.id),
            t.user,
            ago(t.created_at),
            ago(t.last_used_at),
            t.expires_at.isoformat(timespec="minutes") if t.expires_at else "never",
            t.label,
        ]
        for t in tokens
    ]
    print_table(["ID", "USER", "AGE", "LAST USED", "EXPIRES", "LABEL"], rows, wide=output is Output.WIDE)


@click.command()
@click.option("--user", help="Owner of the token. Default: you.")
@click.option("--label", default="", help="Purpose of the token.")
@click.option("--expires", help="Lifetime of the token: 12h, 30d.")
@output_option
@on_server
def create(client: Client, output: Output, user: str | None, label: str, expires: str | None) -> None:
    """Create a token. It is printed only once: the server keeps only its hash.

    Example: shoal token create --user ada > ada.token; then SHOAL_TOKEN_FILE=ada.token shoal ps
    """
    from shoal.cli.out import say
    from shoal.cli.report import print_document
    from shoal.cli.times import seconds

    expires_in_s = seconds(expires) if expires is not None else None
    made = client.create_token(user=user, label=label, expires_in_s=expires_in_s)
    if output.for_people:
        print(made.token)
        say(f"token {made.id} of {made.user}; it is not shown again")
    else:
        print_document(output, made, made.token)


@click.command()
@click.argument("token_id", type=click.IntRange(min=0), metavar="ID", help="Number of the token.")
@on_server
def rm(client: Client, token_id: int) -> None:
    """Revoke a token."""
    from shoal.cli.out import say

    client.delete_token(token_id)
    say(f"token {token_id} is revoked")
