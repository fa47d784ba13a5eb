"""Commands by name, loaded when they are called, so that `shoal --help` answers at once."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import typer
import typer.core
from typer import BadParameter

# typer brings its own copy of click in newer versions and uses the installed one in older ones: these are
# the classes of whichever it is.
UsageError: type[Any] = BadParameter.__mro__[1]
ClickException: type[Any] = UsageError.__mro__[1]


class NobodyReads(Exception):
    """What the command prints goes to a program that has ended, such as head."""


class LazyGroup(typer.core.TyperGroup):
    """A group whose commands are `{name: ("module:function", "one line of help")}`.

    A function is a plain one with typer annotations; `module:GROUP` may also be another `LazyGroup`.
    """

    def __init__(self, name: str, table: Mapping[str, tuple[str, str]], help: str, **kwargs: Any) -> None:
        settings = {"help_option_names": ["-h", "--help"]}
        super().__init__(
            name=name,
            help=help,
            no_args_is_help=True,
            context_settings=settings,
            rich_markup_mode=None,
            **kwargs,
        )
        self.table = table

    def invoke(self, ctx: Any) -> Any:
        """As ever, but Ctrl-C is told, and nobody reading on is no error: typer would end without a word."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:
            raise NobodyReads from error
        except (KeyboardInterrupt, SystemError) as error:
            from shoal.sim.interrupts import is_interrupt

            if not is_interrupt(error):
                raise
            raise typer.Abort from None

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.table)

    def get_command(self, ctx: Any, name: str) -> Any:
        if name not in self.table:
            return None
        module, _, attribute = self.table[name][0].partition(":")
        found = getattr(import_module(module), attribute)
        if isinstance(found, LazyGroup):
            return found
        app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
        app.command(name=name)(found)
        command = typer.main.get_command(app)
        command.name = name
        for parameter in command.params:
            if getattr(parameter, "multiple", False) and not parameter.metavar:
                parameter.metavar = "<str>"  # newer typer would print its Python type
        return command

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[Any, Any, list[str]]:
        if args and args[0] not in self.table and not args[0].startswith("-"):
            from shoal.core.errors import did_you_mean

            raise UsageError(f"there is no command {args[0]!r}; {did_you_mean(args[0], self.table)}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in self.table.items()])
