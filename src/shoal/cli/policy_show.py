"""`shoal policy show NAME`."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import click

from shoal.cli.extras import require
from shoal.cli.options import output_option, policy_names
from shoal.cli.out import Output
from shoal.cli.report import reported


@click.command()
@click.argument(
    "name",
    metavar="NAME",
    shell_complete=policy_names,
    help="Name of a policy; `shoal policy ls` lists them.",
)
@output_option
@reported
def show(name: str, output: Output) -> None:
    """Show what a policy does, and its options with their defaults."""
    require("shoal policy show", "server", "sim")
    from shoal.policies.registry import policy_class

    cls = policy_class(name)
    if not output.for_people:
        from shoal.cli.report import print_document
        from shoal.server.api.models import Policy

        print_document(
            output,
            Policy(
                name=cls.name,
                summary=cls.summary,
                elastic=cls.elastic,
                needs_lengths=cls.needs_lengths,
                options=dataclasses.asdict(cls.Options()),
            ),
            cls.name,
        )
        return
    print(f"{cls.name}: {cls.summary}\n")
    print(inspect.cleandoc(cls.__doc__ or ""))
    fields = dataclasses.fields(cls.Options)
    print("\nOptions:" if fields else "\nIt has no options.")
    notes = option_notes(cls.Options)
    for field in fields:
        print(f"  {field.name} = {shown(field.default)}")
        for line in notes.get(field.name, []):
            print(f"      {line}")


def shown(value: Any) -> str:
    """A value in the form that `--option name=` takes."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ",".join(map(shown, value)) if isinstance(value, tuple | list) else str(value)


def option_notes(cls: type[Any]) -> dict[str, list[str]]:
    """The `#:` comments above each option in the source: its documentation."""
    notes: dict[str, list[str]] = {}
    for base in reversed(cls.__mro__[:-1]):
        pending: list[str] = []
        try:
            lines = inspect.getsource(base).splitlines()
        except (OSError, TypeError):
            continue
        for line in lines:
            text = line.strip()
            if text.startswith("#:"):
                pending.append(text[2:].strip())
            elif pending and ":" in text:
                notes[text.split(":")[0]] = pending
                pending = []
            else:
                pending = []
    return notes
