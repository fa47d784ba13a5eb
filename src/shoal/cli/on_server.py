"""What all commands that talk to a server have in common: which server, how to print, how errors look."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from shoal.cli.options import Home, Out, Output, Server, TokenFile, connect
from shoal.cli.report import reported

SHARED = {
    "output": (Out, Output.TABLE),
    "home": (Home, None),
    "server": (Server, None),
    "token_file": (TokenFile, None),
}


def on_server(command: Callable[..., None]) -> Callable[..., None]:
    """Make `command(client, ..., output)` one that takes `-o`, `--home`, `--server` and `--token-file` as well."""
    own = list(inspect.signature(command).parameters.values())[1:]
    takes_output = any(p.name == "output" for p in own)
    mine = [p.replace(annotation=_evaluated(p.annotation, command)) for p in own if p.name not in SHARED]
    shared = [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=kind)
        for name, (kind, default) in SHARED.items()
        if name != "output" or takes_output
    ]

    def run(**given: Any) -> None:
        home, server, token_file = (given.pop(name) for name in ("home", "server", "token_file"))
        with connect(home, server, token_file) as client:
            command(client, **given)

    made = reported(run)
    made.__name__, made.__doc__, made.__module__ = command.__name__, command.__doc__, command.__module__
    del made.__wrapped__  # type: ignore[attr-defined]
    parameters = [*mine, *shared]
    made.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    made.__annotations__ = {p.name: p.annotation for p in parameters}
    return made


def _evaluated(annotation: Any, command: Callable[..., None]) -> Any:
    """Annotations are strings until someone asks; only the client's type is not there at run time."""
    return eval(annotation, command.__globals__) if isinstance(annotation, str) else annotation
