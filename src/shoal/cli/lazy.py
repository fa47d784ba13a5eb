"""Commands by name, loaded when they are called, so that `shoal --help` answers at once."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import click


class LazyGroup(click.Group):
    """A group whose commands are `{name: ("module:function", "one line of help")}`.

    A function is a plain one with typer annotations; `module:GROUP` may also be another `LazyGroup`.
    """

    def __init__(self, *args: Any, table: Mapping[str, tuple[str, str]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.table = table

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.table)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in self.table:
            return None
        module, _, attribute = self.table[name][0].partition(":")
        found = getattr(import_module(module), attribute)
        if isinstance(found, click.Command):
            return found
        import typer

        app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
        app.command(name=name)(found)
        command = typer.main.get_command(app)
        command.name = name
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in self.table and not args[0].startswith("-"):
            from shoal.core.errors import did_you_mean

            raise click.UsageError(f"there is no command {args[0]!r}; {did_you_mean(args[0], self.table)}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in self.table.items()])
