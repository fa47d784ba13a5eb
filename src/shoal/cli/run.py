"""`shoal run`: a job from the command line."""

from __future__ import annotations

from typing import Annotated

import typer

from shoal.cli.options import Home, Out, Output, Server, TokenFile
from shoal.cli.report import reported
from shoal.cli.spec_options import Gpus, JobName


@reported
def run(
    command: Annotated[list[str], typer.Argument(metavar="-- CMD...", help="Program and arguments.")],
    gpus: Gpus = None,
    name: JobName = None,
    resize: Annotated[
        str | None, typer.Option(help="live (uses shoal.torch), restart or never. Default: live for a range.")
    ] = None,
    env: Annotated[list[str] | None, typer.Option("-e", "--env", help="NAME=value, or NAME.")] = None,
    secret: Annotated[list[str] | None, typer.Option(help="The same, never shown again.")] = None,
    max_restarts: Annotated[int | None, typer.Option(help="Start it again that often if it fails.")] = None,
    expected: Annotated[str | None, typer.Option(help="How long it takes, if you know: 20m, 2h.")] = None,
    autoscale: Annotated[
        str | None,
        typer.Option(
            help="Search its size while it trains: efficiency:threshold=0.5; see docs/knowledge.md."
        ),
    ] = None,
    needs: Annotated[
        list[str] | None,
        typer.Option(help="What it takes of its GPU: gpu_mem_mb=6000, gpu_util=40, pre_s=20; repeat."),
    ] = None,
    detach: Annotated[bool, typer.Option("-d", "--detach", help="Submit, and do not stay.")] = False,
    output: Out = Output.TABLE,
    home: Home = None,
    server: Server = None,
    token_file: TokenFile = None,
) -> None:
    """Run a command on GPUs: submit it, show its output, and end as it ends.

    Ctrl-C detaches; the job goes on. Exit codes: 0 succeeded, 100 failed, 103 cancelled.

    Examples:

      shoal run --gpus 1..4 -- python train.py --epochs 10

      shoal run -d --gpus 2 --name bert -- torchrun train.py
    """
    from shoal.cli import spec_options
    from shoal.cli.options import connect
    from shoal.cli.submit import hand_in
    from shoal.cli.times import seconds

    given = {
        "gpus": gpus,
        "name": name,
        "resize": resize,
        "env": spec_options.shell_environment() | spec_options.environment(env),
        "secrets": spec_options.environment(secret, "--secret") or None,
        "max_restarts": max_restarts,
        "autoscale": autoscale,
        "expected_s": seconds(expected) if expected else None,
        "needs": spec_options.numbers(needs, "--needs") or None,
    }
    spec = spec_options.from_command(command, **given)
    with connect(home, server, token_file) as client:
        raise typer.Exit(hand_in(client, spec, detach=detach, output=output))
