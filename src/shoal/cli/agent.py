"""`shoal agent`: run the workers of this machine for a server elsewhere."""

from __future__ import annotations

from pathlib import Path

import click

from shoal.cli.report import reported


@click.command()
@click.option(
    "--join", required=True, metavar="ADDRESS", help="HOST:PORT of the server; `shoal node add` prints it."
)
@click.option(
    "--token-file",
    type=click.Path(path_type=Path),
    help="File with the join token, for the first connection.",
)
@click.option(
    "--gpus", type=click.IntRange(min=1), help="Number of virtual GPUs, on the CPU. Default: the real GPUs."
)
@click.option(
    "--type", "gpu_type", envvar="SHOAL_GPU_TYPE", help="Type of the GPUs. Default: as the driver says."
)
@click.option("--rack", envvar="SHOAL_RACK", default="rack0", help="Rack of this machine.")
@click.option("--domain", envvar="SHOAL_DOMAIN", default="domain0", help="Domain of its rack.")
@click.option("--address", envvar="SHOAL_ADDRESS", help="What other machines connect to. Default: found out.")
@click.option(
    "--bind", metavar="A", help="What workers here listen on, if not on --address (see docs/clusters.md)."
)
@click.option("--name", help="Name of this machine. Default: its host name.")
@click.option("--state", type=click.Path(path_type=Path), help="Directory of the agent's files.")
@click.option(
    "--allow-root",
    is_flag=True,
    envvar="SHOAL_ALLOW_ROOT",
    help="An agent that runs as root runs jobs of users without an account as root.",
)
@reported
def agent(
    join: str,
    token_file: Path | None,
    gpus: int | None,
    gpu_type: str | None,
    rack: str,
    domain: str,
    address: str | None,
    bind: str | None,
    name: str | None,
    state: Path | None,
    allow_root: bool,
) -> None:
    """Join a server and run workers for it until Ctrl-C. The workers go on; an agent that returns takes them over."""
    from shoal.agents.main import AgentOptions, run

    run(
        AgentOptions(
            join, token_file, gpus, gpu_type, rack, domain, address, name, state, allow_root, bind or ""
        )
    )
