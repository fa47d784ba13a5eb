"""`shoal version`: of this program, and of the server if one answers."""

from __future__ import annotations

from shoal.cli.options import Home, Out, Output, Server, TokenFile


def version(
    output: Out = Output.TABLE, home: Home = None, server: Server = None, token_file: TokenFile = None
) -> None:
    """The version of this program, and of the server if one answers."""
    from shoal import __version__
    from shoal.cli.options import connect
    from shoal.cli.out import print_json
    from shoal.client_errors import ClientError

    try:
        with connect(home, server, token_file, timeout_s=2.0) as client:
            there = client.status().version
    except ClientError:
        there = None
    if output in (Output.JSON, Output.JSONL):
        print_json({"client": __version__, "server": there, "api": "v1"})
    else:
        print(f"shoal {__version__}" + (f" (server {there})" if there else ""))
