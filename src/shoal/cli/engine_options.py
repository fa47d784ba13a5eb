"""The options of `shoal up` about the engine that provides the machines."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import click

from shoal.core.errors import ShoalError

OPTIONS = (
    click.option(
        "--engine",
        type=click.Choice(["ray", "slurm", "none"]),
        help="Request machines from Ray or Slurm; see docs/clusters.md. Remembered for the next `shoal up`.",
    ),
    click.option("--nodes", metavar="MIN..MAX", help="Machines to hold, for example 1..8. Default: 1..8."),
    click.option(
        "--gpus-per-node",
        metavar="[TYPE:]N",
        help="GPUs of each machine, for example 4 or a100:4. Default: all of its node.",
    ),
    click.option("--idle", help="Return a machine that was idle for so long. Default: 10m."),
    click.option("--ray-address", help="Ray: address of the cluster. Default: auto."),
    click.option("--partition", help="Slurm: the partition."),
    click.option("--time", "time_limit", help="Slurm: time limit of each machine, for example 4h."),
    click.option(
        "--sbatch-option",
        multiple=True,
        help="Slurm: a further option of sbatch, for example --sbatch-option=--account=lab. Repeat for more.",
    ),
    click.option(
        "--agent-python", help="The Python that runs the agents. Default: this one, at the same path."
    ),
)
_NAMES = (
    *("engine", "nodes", "gpus_per_node", "idle", "ray_address"),
    *("partition", "time_limit", "sbatch_option", "agent_python"),
)


def engine_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options, and pass what was given as `engine`: a dictionary for `settings_from`."""

    @functools.wraps(command)
    def collected(**given: Any) -> Any:
        return command(engine=_given(**{name: given.pop(name) for name in _NAMES}), **given)

    return functools.reduce(lambda made, option: option(made), reversed(OPTIONS), collected)


def _given(
    engine: str | None,
    nodes: str | None,
    gpus_per_node: str | None,
    idle: str | None,
    ray_address: str | None,
    partition: str | None,
    time_limit: str | None,
    sbatch_option: tuple[str, ...],
    agent_python: str | None,
) -> dict[str, Any]:
    from shoal.cli.times import seconds

    found: dict[str, Any] = {
        "kind": engine,
        "nodes": None if nodes is None else node_range(nodes),
        "idle_s": None if idle is None else seconds(idle),
        "ray_address": ray_address,
        "partition": partition,
        "time_s": None if time_limit is None else _time_limit_s(time_limit),
        "sbatch_options": list(sbatch_option) or None,
        "python": agent_python,
    }
    written = {name: value for name, value in found.items() if value is not None}
    # Without a type it takes back a type of the last start.
    return written if gpus_per_node is None else written | _gpus_of(gpus_per_node)


def node_range(text: str) -> list[int]:
    """`1..8`, or `4` for `4..4`."""
    found = re.fullmatch(r"(\d{1,6})(?:\.\.(\d{1,6}))?", text)
    if found is None:
        raise ShoalError(f"--nodes {text!r} is not a range of machines: write 1..8 or 4")
    low, high = int(found[1]), int(found[2] or found[1])
    if low > high or high == 0:
        raise ShoalError(f"--nodes {text!r} is an empty range: write 1..8 or 4")
    return [low, high]


def _gpus_of(text: str) -> dict[str, Any]:
    found = re.fullmatch(r"(?:([A-Za-z_][\w.-]*):)?(\d{1,4})", text)
    if found is None or int(found[2]) == 0:
        raise ShoalError(f"--gpus-per-node {text!r} is not a number of GPUs: write 4 or a100:4")
    return {"gpus": int(found[2]), "gpu_type": found[1]}


def _time_limit_s(text: str) -> float:
    from shoal.cli.times import seconds

    found_s = seconds(text)
    if found_s < 60:
        raise ShoalError(f"--time {text} is too short: Slurm's time limits are whole minutes")
    return found_s
