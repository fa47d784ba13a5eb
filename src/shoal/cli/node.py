"""`shoal node`: the machines, the jobs on them, and draining one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from shoal.cli.lazy import LazyGroup
from shoal.cli.options import on_server, output_option, yes_option
from shoal.cli.out import Output

if TYPE_CHECKING:
    from shoal.client import Client
    from shoal.server.api.models import Node, NodeStatus

COMMANDS = {
    "ls": ("shoal.cli.node:ls", "List the nodes."),
    "show": ("shoal.cli.node:show", "Show a node and the jobs on it."),
    "drain": ("shoal.cli.node:drain", "Stop using a node."),
    "uncordon": ("shoal.cli.node:uncordon", "Use a drained node again."),
    "rm": ("shoal.cli.node:rm", "Forget a node that is lost."),
    "add": ("shoal.cli.node_add:add", "Print, or run by ssh, the command that lets a machine join."),
    "join-token": ("shoal.cli.join_token:GROUP", "Tokens with which machines join: create, ls, rm."),
}
GROUP = LazyGroup("node", COMMANDS, "Nodes, and the jobs on them.")
node_argument = click.argument("name", metavar="NODE", help="Name of the node.")


def _row(node: NodeStatus) -> list[str]:
    kind = f"{node.gpu_type} (virtual)" if node.virtual and node.gpu_type != "virtual" else node.gpu_type
    said = [node.why, *node.warnings]
    # a reason may quote the engine already
    if node.engine is not None and node.engine not in (node.why or ""):
        said.append(node.engine)
    why = "; ".join(words for words in said if words)
    return [
        node.name,
        node.state,
        kind,
        f"{node.used}/{node.gpus}",
        node.address,
        why,
        ", ".join(node.devices),
    ]


HEAD = ["NODE", "STATE", "TYPE", "IN USE", "ADDRESS", "WHY", "DEVICES"]


def _print(node: Node, output: Output) -> None:
    from shoal.cli.columns import print_table
    from shoal.cli.report import print_document

    if not output.for_people:
        print_document(output, node, node.name)
        return
    print_table(HEAD, [_row(node)], wide=output is Output.WIDE)
    if node.engine is not None:
        print(f"engine: {node.engine}")
    for warning in node.warnings:
        print(f"warning: {warning}; `shoal doctor` says what to do")
    if node.jobs:
        print()
        rows = [
            [j.name or f"a job of {j.user}", j.user, j.state.value, str(j.gpus), str(j.target_gpus)]
            for j in node.jobs
        ]
        print_table(["JOB", "USER", "STATE", "GPUS", "TARGET"], rows)


@click.command()
@output_option
@on_server
def ls(client: Client, output: Output) -> None:
    """List the nodes."""
    from shoal.cli.columns import print_table
    from shoal.cli.report import print_document
    from shoal.cli.times import clock

    found = client.node_list()
    if not output.for_people:
        print_document(output, found, [node.name for node in found.items])
        return
    print_table(HEAD, [_row(node) for node in found.items], wide=output is Output.WIDE)
    if found.refused:
        print("\nagents that were refused:")
        rows = [[r.agent or "-", r.address, clock(r.at), r.why] for r in found.refused]
        print_table(["NAME", "ADDRESS", "LAST", "WHY"], rows, wide=True)


@click.command()
@node_argument
@output_option
@on_server
def show(client: Client, name: str, output: Output) -> None:
    """Show a node and the jobs that hold GPUs on it."""
    _print(client.node(name), output)


@click.command()
@node_argument
@yes_option
@output_option
@on_server
def drain(client: Client, name: str, output: Output, yes: bool) -> None:
    """Stop using a node: elastic jobs move away or wait with their state saved, jobs of a fixed size are suspended."""
    from shoal.cli.several import confirmed

    if output.for_people:
        confirmed(f"Drain {name}?", yes=yes)
    _print(client.drain(name), output)


@click.command()
@node_argument
@output_option
@on_server
def uncordon(client: Client, name: str, output: Output) -> None:
    """Use a drained node again."""
    _print(client.uncordon(name), output)


@click.command()
@node_argument
@on_server
def rm(client: Client, name: str) -> None:
    """Forget a node that is lost. Its agent needs a new join token to come back."""
    from shoal.cli.out import say

    client.remove_node(name)
    say(f"{name} is removed")
