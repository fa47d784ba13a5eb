"""Options and arguments that several commands share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shoal.cli.out import Output
from shoal.cli.report import reported

if TYPE_CHECKING:
    from shoal.client import Client


def job_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Names of jobs for shell completion; none if the server does not answer."""
    from shoal.client import Client

    try:
        with Client(timeout_s=1.0) as client:
            return [j.name for j in client.jobs(limit=200) if j.name.startswith(incomplete)]
    except Exception:
        return []


def policy_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Names of policies for shell completion; none if the scheduler is not installed."""
    try:
        from shoal.policies.registry import policy_names
    except ImportError:
        return []
    return [name for name in policy_names() if name.startswith(incomplete)]


output_option = click.option(
    "-o",
    "--output",
    type=click.Choice([output.value for output in Output]),
    default=Output.TABLE.value,
    callback=lambda ctx, param, value: Output(value),
    help="Output format.",
)
home_option = click.option(
    "--home",
    type=click.Path(path_type=Path),
    envvar="SHOAL_HOME",
    show_envvar=True,
    help="Directory of the server's state.",
)
server_option = click.option(
    "--server", envvar="SHOAL_SERVER", show_envvar=True, help="Address of a server on another machine."
)
token_file_option = click.option(
    "--token-file",
    type=click.Path(path_type=Path),
    envvar="SHOAL_TOKEN_FILE",
    show_envvar=True,
    help="File that contains your token.",
)
yes_option = click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")
job_argument = click.argument("job", metavar="JOB", shell_complete=job_names, help="Name or number of a job.")
jobs_argument = click.argument(
    "jobs",
    metavar="JOB...",
    nargs=-1,
    required=True,
    shell_complete=job_names,
    help="Names or numbers of jobs.",
)


@dataclass(frozen=True, slots=True)
class Connect:
    """Connects to the server that `--home`, `--server` and `--token-file` name."""

    home: Path | None
    server: str | None
    token_file: Path | None

    def __call__(self, *, timeout_s: float = 30.0) -> Client:
        from shoal.client import Client

        return Client(self.server, home=self.home, token_file=self.token_file, timeout_s=timeout_s)


def server_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add `--home`, `--server` and `--token-file`, which the command receives as `connect`."""

    @home_option
    @server_option
    @token_file_option
    @functools.wraps(command)
    def run(home: Path | None, server: str | None, token_file: Path | None, **given: Any) -> None:
        command(connect=Connect(home, server, token_file), **given)

    return run


def on_server(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of `server_options`. The command receives an open client; its errors are reported."""

    @server_options
    @reported
    @functools.wraps(command)
    def run(connect: Connect, **given: Any) -> None:
        with connect() as client:
            command(client=client, **given)

    return run
