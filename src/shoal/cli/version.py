"""`shoal version`: the versions of this program and of the server."""

from __future__ import annotations

import click

from shoal.cli.options import Connect, output_option, server_options
from shoal.cli.out import Output


@click.command()
@output_option
@server_options
def version(connect: Connect, output: Output) -> None:
    """Print the version of this program, and of the server if one answers."""
    from shoal import __version__
    from shoal.cli.out import print_json
    from shoal.client.errors import ClientError

    try:
        with connect(timeout_s=2.0) as client:
            there = client.status().version
    except ClientError:
        there = None
    if output in (Output.JSON, Output.JSONL):
        print_json({"client": __version__, "server": there, "api": "v1"})
    else:
        print(f"shoal {__version__}" + (f" (server {there})" if there else ""))
