"""`shoal run`: submit a command as a job, and follow it."""

from __future__ import annotations

import click

from shoal.cli.options import Connect, output_option, server_options
from shoal.cli.out import Output
from shoal.cli.report import reported
from shoal.cli.spec_options import name_option


@click.command()
@click.argument("command", nargs=-1, required=True, metavar="-- CMD...", help="Program and arguments.")
@click.option("--gpus", "-g", help="Number of GPUs: 4, a range 1..8, or auto.")
@name_option
@click.option(
    "--resize",
    help="How the job changes its size: live (uses shoal.torch), restart or never. Default: live for a range.",
)
@click.option(
    "-e",
    "--env",
    multiple=True,
    help="Variable of the job: NAME=value, or NAME to copy it from here. Repeat for more.",
)
@click.option("--secret", multiple=True, help="Like --env, but the value is never shown again.")
@click.option("--max-restarts", type=int, help="Restart the job at most this often if it fails.")
@click.option("--expected", help="Expected duration, if you know it: 20m, 2h.")
@click.option(
    "--autoscale",
    help="Search the best size while the job trains: efficiency:threshold=0.5; see docs/knowledge.md.",
)
@click.option(
    "--needs",
    multiple=True,
    help="What a worker needs of its GPU: gpu_mem_mb=6000, gpu_util=40, pre_s=20. Repeat for more.",
)
@click.option("-d", "--detach", is_flag=True, help="Submit the job and return.")
@output_option
@server_options
@reported
def run(
    connect: Connect,
    command: tuple[str, ...],
    gpus: str | None,
    name: str | None,
    resize: str | None,
    env: tuple[str, ...],
    secret: tuple[str, ...],
    max_restarts: int | None,
    expected: str | None,
    autoscale: str | None,
    needs: tuple[str, ...],
    detach: bool,
    output: Output,
) -> None:
    """Run a command on GPUs: submit it, print its output, and exit with its result.

    Ctrl-C detaches; the job continues. Exit codes: 0 succeeded, 100 failed, 103 cancelled.

    Examples:

      shoal run --gpus 1..4 -- python train.py --epochs 10

      shoal run -d --gpus 2 --name bert -- torchrun train.py
    """
    from shoal.cli import spec_options
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
    with connect() as client:
        raise SystemExit(hand_in(client, spec, detach=detach, output=output))
