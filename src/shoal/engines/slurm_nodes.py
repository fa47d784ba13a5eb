"""What sinfo says of nodes: their state, GPU type and place in the topology."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class Node:
    """A node. Features that begin with `rack` or `domain` name its place in the topology."""

    FORMAT: ClassVar[str] = "NodeList:.64,StateLong:.32,Gres:.256,Features:.256"

    name: str
    state: str
    gres: str
    features: tuple[str, ...]

    @property
    def responds(self) -> bool:
        """Whether slurmd on the node answers. Only then a job's end means that its processes are dead."""
        return not re.match(r"down|unknown|fail|.*\*$", self.state)

    @property
    def gpu_type(self) -> str:
        """The type of the node's GPUs, or an empty string if they have no type or several."""
        types = set(re.findall(r"\bgpu:([A-Za-z_][^:,(\s]*)", self.gres))
        return types.pop() if len(types) == 1 else ""

    @property
    def gpus(self) -> dict[str, int]:
        """The node's GPUs by type. The type is empty if Slurm does not know it."""
        found: dict[str, int] = {}
        for gpu_type, gpus in re.findall(r"\bgpu(?::([A-Za-z_][^:,(\s]*))?:(\d+)", self.gres):
            found[gpu_type] = found.get(gpu_type, 0) + int(gpus)
        return found

    @property
    def rack(self) -> str:
        return next((f for f in self.features if f.startswith("rack")), "")

    @property
    def domain(self) -> str:
        return next((f for f in self.features if f.startswith("domain")), "")


def parse_nodes(out: str) -> dict[str, Node]:
    """The output of `sinfo -N -O FORMAT`. A node of several partitions is listed several times."""
    nodes = {}
    for line in out.splitlines():
        fields = line.split()
        if len(fields) == 4:
            name, state, gres, features = fields
            nodes[name] = Node(name, state, gres, tuple(features.split(",")))
    return nodes
