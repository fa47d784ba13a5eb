"""`shoal status`: the server, its policy, GPUs and jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from shoal.cli.options import on_server, output_option
from shoal.cli.out import Output

if TYPE_CHECKING:
    from shoal.client import Client


@click.command()
@output_option
@on_server
def status(client: Client, output: Output) -> None:
    """Show the server's address, policy, GPUs and jobs. Exit code 6 if no server answers."""
    from shoal.cli.columns import print_table
    from shoal.cli.report import print_document
    from shoal.cli.times import ago

    found = client.status()
    if not output.for_people:
        print_document(output, found, found.address)
        return
    kind = " (virtual, on the CPU)" if found.virtual else ""
    jobs = ", ".join(f"{n} {state}" for state, n in found.jobs.items() if n) or "none"
    options = " ".join(f"{k}={v}" for k, v in found.policy_given.items())
    for name, value in (
        ("server", f"{found.address}  (shoal {found.version}, pid {found.pid}, up {ago(found.started_at)})"),
        ("home", found.home),
        ("you are", f"{found.user} ({found.role})"),
        ("policy", f"{found.policy} {options}".strip()),
        ("GPUs", f"{found.used_gpus} of {found.total_gpus} in use{kind}"),
        ("jobs", jobs),
        ("runs on", f"{found.executor}, {found.store}"),
    ):
        print(f"{name:<10} {value}")
    print()
    rows = [[n.name, n.state, n.gpu_type, f"{n.used}/{n.gpus}", ", ".join(n.devices)] for n in found.nodes]
    print_table(["NODE", "STATE", "TYPE", "IN USE", "DEVICES"], rows, wide=output is Output.WIDE)
    for warning in found.warnings:
        print(f"warning: {warning}")
