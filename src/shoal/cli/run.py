"""`shoal run`: submit a command as a job, and follow it."""

from __future__ import annotations

from typing import Any

import click

from shoal.cli.condition_options import condition_options, conditions
from shoal.cli.options import Connect, output_option, server_options
from shoal.cli.out import Output
from shoal.cli.report import reported
from shoal.cli.spec_options import name_option


@click.command()
@click.argument("command", nargs=-1, required=True, metavar="-- CMD...", help="Program and arguments.")
@click.option(
    "--gpus", "-g", help="Number of GPUs: 4, a range 1..8, only multiples of 2 of it 2..8:2, or auto."
)
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
@click.option("--env-all", is_flag=True, help="Pass on all variables of this shell; see docs/environment.md.")
@click.option("--secret", multiple=True, help="Like --env, but the value is never shown again.")
@click.option("--max-restarts", type=int, help="Restart the job at most this often if it fails.")
@click.option("--expected", help="Expected duration, if you know it: 20m, 2h.")
@click.option(
    "--autoscale",
    help="Search the best size while the job trains: efficiency:threshold=0.5, or "
    "utility:worth=10,0:at_s=0,3600:price_per_gpu_hour=1 (worth 10 at once, 0 after an hour); see docs/knowledge.md.",
)
@click.option(
    "--needs",
    multiple=True,
    help="What a worker needs of its GPU: gpu_mem_mb=6000, gpu_util=40, pre_s=20. Repeat for more.",
)
@click.option(
    "--upload",
    is_flag=True,
    default=None,
    help="Send this directory to the machines, which need not share it; see docs/clusters.md.",
)
@condition_options
@click.option("--interactive", is_flag=True, help="Run the command in this terminal. The job ends with it.")
@click.option(
    "--per-gpu",
    is_flag=True,
    default=None,
    help="Start the command once per GPU, with RANK and WORLD_SIZE. Default: once per machine.",
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
    env_all: bool,
    secret: tuple[str, ...],
    max_restarts: int | None,
    expected: str | None,
    autoscale: str | None,
    needs: tuple[str, ...],
    upload: bool | None,
    interactive: bool,
    per_gpu: bool | None,
    detach: bool,
    output: Output,
    **when: Any,
) -> None:
    """Run a command on GPUs: submit it, print its output, and exit with its result.

    Ctrl-C detaches; the job continues. Exit codes: 0 succeeded, 100 failed, 103 cancelled.

    Examples:

      shoal run --gpus 1..4 -- python train.py --epochs 10

      shoal run -d --gpus 2 --name bert -- torchrun train.py

      shoal run -d --array 0-99%8 -- python fold.py --fold {index}

    A command starts once per machine and sees all GPUs of the job there. A script that uses shoal.torch, or any command
    with --per-gpu, starts once per GPU.
    """
    from shoal.cli import spec_options
    from shoal.cli.submit import hand_in
    from shoal.cli.times import seconds
    from shoal.client.shell import shell_environment, whole_environment

    passed_on, hidden = whole_environment() if env_all else (shell_environment(), {})
    variables, secrets = spec_options.environment(env), spec_options.environment(secret, "--secret")
    variables = {k: v for k, v in passed_on.items() if k not in secrets} | variables
    secrets = {k: v for k, v in hidden.items() if k not in variables} | secrets
    given = {
        "gpus": gpus,
        "name": name,
        "resize": "never" if interactive else resize,
        "env": variables,
        "secrets": secrets or None,
        "max_restarts": max_restarts,
        "autoscale": autoscale,
        "expected_s": seconds(expected) if expected else None,
        "upload": upload,
        "per_gpu": per_gpu,
        "interactive": interactive or None,
        "needs": spec_options.numbers(needs, "--needs") or None,
    }
    spec = spec_options.from_command(command, **given, **conditions(**when))
    with connect() as client:
        if interactive:
            from shoal.cli.terminal import run_interactive

            raise SystemExit(run_interactive(client, spec))
        raise SystemExit(hand_in(client, spec, detach=detach, output=output))
