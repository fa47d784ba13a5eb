"""Groups whose commands are imported when they are called, so that `shoal --help` answers at once."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

import click

from shoal.core.errors import did_you_mean


class LazyGroup(click.Group):
    """A group with a table `{name: ("module:command", "one line of help")}`."""

    def __init__(
        self, name: str, table: Mapping[str, tuple[str, str]], help: str, epilog: str | None = None
    ) -> None:
        settings = {"help_option_names": ["-h", "--help"], "show_default": True}
        super().__init__(name, help=help, epilog=epilog, no_args_is_help=True, context_settings=settings)
        self.table = table

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.table)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.table:
            return None
        module, _, attribute = self.table[cmd_name][0].partition(":")
        command = getattr(import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in self.table and not args[0].startswith("-"):
            ctx.fail(f"there is no command {args[0]!r}; {did_you_mean(args[0], self.table)}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands by the table: click would import every one of them for its help."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in self.table.items()])

    def shell_complete(
        self, ctx: click.Context, incomplete: str
    ) -> list[click.shell_completion.CompletionItem]:
        """Complete the names of commands by the table, for the same reason."""
        items = [
            click.shell_completion.CompletionItem(name, help=text)
            for name, (_, text) in self.table.items()
            if name.startswith(incomplete)
        ]
        return items + click.Command.shell_complete(self, ctx, incomplete)
