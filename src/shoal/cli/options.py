"""The options that many commands share, and what they mean."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from shoal.client import Client


class Output(StrEnum):
    """How to print. `json` is one document, `jsonl` one line per item."""

    TABLE = "table"
    WIDE = "wide"
    JSON = "json"
    JSONL = "jsonl"
    YAML = "yaml"
    NAME = "name"

    @property
    def for_people(self) -> bool:
        return self in (Output.TABLE, Output.WIDE)


def job_names(incomplete: str) -> list[str]:
    """Names of jobs for completion in the shell; nothing when the server cannot be asked."""
    from shoal.client import Client

    try:
        with Client(timeout_s=1.0) as client:
            return [j.name for j in client.jobs(limit=200) if j.name.startswith(incomplete)]
    except Exception:
        return []


def policy_names(incomplete: str) -> list[str]:
    from shoal.policies.registry import policy_names

    return [name for name in policy_names() if name.startswith(incomplete)]


Home = Annotated[
    Path | None, typer.Option("--home", envvar="SHOAL_HOME", help="Directory of the server's state.")
]
Server = Annotated[
    str | None, typer.Option("--server", envvar="SHOAL_SERVER", help="Address of a server elsewhere.")
]
TokenFile = Annotated[
    Path | None, typer.Option("--token-file", envvar="SHOAL_TOKEN_FILE", help="File that holds your token.")
]
Out = Annotated[Output, typer.Option("-o", "--output", help="How to print.")]
Yes = Annotated[bool, typer.Option("-y", "--yes", help="Do not ask.")]
JobArg = Annotated[
    str, typer.Argument(metavar="JOB", help="Name or number of a job.", autocompletion=job_names)
]
JobArgs = Annotated[
    list[str], typer.Argument(metavar="JOB...", help="Names or numbers of jobs.", autocompletion=job_names)
]


def connect(home: Path | None, server: str | None, token_file: Path | None, **kwargs: Any) -> Client:
    """A client for the options as given."""
    from shoal.client import Client

    return Client(server, home=home, token_file=token_file, **kwargs)
