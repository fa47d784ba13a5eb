"""The processes of a job that runs a command: one per machine that sees all its GPUs, or one per GPU.

Pure: which GPUs each process has, and the variables that tell it of the others.
"""

from __future__ import annotations

from collections.abc import Sequence

from shoal.server.loop.devices import Device


def divided(devices: Sequence[Device], *, per_gpu: bool) -> list[list[Device]]:
    """The GPUs of each process, in order of rank."""
    if per_gpu:
        return [[device] for device in devices]
    by_node: dict[int, list[Device]] = {}
    for device in devices:
        by_node.setdefault(device[0], []).append(device)
    return list(by_node.values())


def environment(
    processes: Sequence[Sequence[Device]], rank: int, *, per_gpu: bool, address: str, port: int
) -> dict[str, str]:
    """The variables of one process. `address` and `port` are of the first machine, where all meet."""
    nodes = list(dict.fromkeys(devices[0][0] for devices in processes))
    mine = processes[rank]
    node = mine[0][0]
    here = [devices for devices in processes if devices[0][0] == node]
    common = {
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "SHOAL_NODES": str(len(nodes)),
        "SHOAL_NODE_RANK": str(nodes.index(node)),
        "SHOAL_GPUS": str(len(mine)),
    }
    if per_gpu:
        return common | {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(processes)),
            "LOCAL_RANK": str(here.index(mine)),
            "LOCAL_WORLD_SIZE": str(len(here)),
        }
    # The defaults of torchrun's options. What the command line says wins.
    return common | {
        "PET_NNODES": str(len(nodes)),
        "PET_NODE_RANK": str(nodes.index(node)),
        "PET_NPROC_PER_NODE": str(len(mine)),
        "PET_MASTER_ADDR": address,
        "PET_MASTER_PORT": str(port),
    }
