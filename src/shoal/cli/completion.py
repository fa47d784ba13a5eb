"""`shoal completion SHELL`: what a shell needs to complete commands, options and names of jobs."""

from __future__ import annotations

from typing import Annotated

import typer

SHELLS = ("bash", "zsh", "fish")


def completion(shell: Annotated[str, typer.Argument(help="bash, zsh or fish.")]) -> None:
    """Print the completion script. For bash: source <(shoal completion bash)"""
    from typer.completion import get_completion_script

    from shoal.core.errors import ShoalError, did_you_mean

    if shell not in SHELLS:
        raise ShoalError(f"there is no completion for {shell!r}; {did_you_mean(shell, SHELLS)}")
    print(get_completion_script(prog_name="shoal", complete_var="_SHOAL_COMPLETE", shell=shell))
