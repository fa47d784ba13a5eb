"""`shoal completion SHELL`: the script with which a shell completes commands, options and names of jobs."""

from __future__ import annotations

import click

SHELLS = ("bash", "zsh", "fish")


@click.command()
@click.argument("shell", metavar="SHELL", help="bash, zsh or fish.")
def completion(shell: str) -> None:
    """Print the completion script. For bash: source <(shoal completion bash)"""
    from click.shell_completion import get_completion_class

    from shoal.cli.commands import COMPLETE_VARIABLE, cli
    from shoal.core.errors import ShoalError, did_you_mean

    if shell not in SHELLS:
        raise ShoalError(f"there is no completion for {shell!r}; {did_you_mean(shell, SHELLS)}")
    completer = get_completion_class(shell)
    assert completer is not None
    print(completer(cli, {}, "shoal", COMPLETE_VARIABLE).source())
