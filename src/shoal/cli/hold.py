"""`shoal pause`, `shoal resume`, `shoal checkpoint JOB...`: each acts on all jobs that are named."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from shoal.cli.options import jobs_argument, on_server, output_option
from shoal.cli.out import Output

if TYPE_CHECKING:
    from shoal.client import Client


@click.command()
@jobs_argument
@output_option
@on_server
def pause(client: Client, jobs: tuple[str, ...], output: Output) -> None:
    """Pause jobs: they release their GPUs and keep their state."""
    from shoal.cli.several import each

    each(jobs, client.pause, "paused", output, lambda array: client.change_array(array, "pause"))


@click.command()
@jobs_argument
@output_option
@on_server
def resume(client: Client, jobs: tuple[str, ...], output: Output) -> None:
    """Resume paused jobs."""
    from shoal.cli.several import each

    each(jobs, client.resume, "resumed", output, lambda array: client.change_array(array, "resume"))


@click.command()
@jobs_argument
@output_option
@on_server
def checkpoint(client: Client, jobs: tuple[str, ...], output: Output) -> None:
    """Ask running jobs that use shoal.torch to save their state at their next step."""
    from shoal.cli.several import each

    each(jobs, client.checkpoint, "asked to save its state", output)
