"""Several machines on this one, for trying: an agent process with virtual GPUs for each node of a cluster file.

Each agent has a loopback address of its own. The agents outlive the server, as on real machines: the next server of the
home finds those that run and starts the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from shoal.agents.main import NAME
from shoal.core.cluster import Node
from shoal.core.errors import InputError
from shoal.server.home import start_time
from shoal.server.machines import Machines
from shoal.wire.atomic_file import write_atomically

KEY = "virtual_cluster"
TOKEN_S = 600.0
END_S = 10.0
"""How long an agent may take to end before it is killed."""
MOST_NODES = 64
"""Each is a process of this machine, with a warm parent of some hundred megabytes once jobs run there."""


class Started(msgspec.Struct, frozen=True):
    pid: int
    start_time: int


def rows_of(nodes: Sequence[Node], file: Path) -> list[dict[str, Any]]:
    """For the store. The simulator allows names that no agent can have, and any number of nodes."""
    if len(nodes) > MOST_NODES:
        words = (
            f"at most {MOST_NODES} nodes run on one machine, not {len(nodes)}: simulate more with shoal sim"
        )
        raise InputError(words, file=str(file), field="nodes")
    for node in nodes:
        if NAME.fullmatch(node.name) is None:
            words = "is not a name of a node: use letters, digits, '.', '_' and '-'"
            raise InputError(f"{node.name!r} {words}", file=str(file), field="name")
    return [
        {"name": n.name, "gpus": n.gpus, "type": n.gpu_type, "rack": n.rack, "domain": n.domain}
        for n in nodes
    ]


def address_of(index: int) -> str:
    return f"127.0.{index // 250}.{index % 250 + 2}"


class VirtualCluster:
    def __init__(self, directory: Path, rows: Sequence[Mapping[str, Any]]) -> None:
        """`directory` has the state of all agents."""
        self._directory, self._rows = directory, rows
        self._children: list[subprocess.Popen[bytes]] = []

    @property
    def names(self) -> set[str]:
        return {row["name"] for row in self._rows}

    def start(self, machines: Machines) -> None:
        """Start the agents that do not run. Other machines can connect already."""
        for path in self._directory.glob("*"):
            if path.name not in self.names:  # of another cluster file
                self._signal(path.name, signal.SIGTERM)
        for index, row in enumerate(self._rows):
            if self._running(row["name"]) is None:
                self._start(row, address_of(index), machines)

    def _start(self, row: Mapping[str, Any], address: str, machines: Machines) -> None:
        state = self._directory / row["name"]
        state.mkdir(parents=True, exist_ok=True, mode=0o700)
        token = state / "join-token"
        if not (state / "credential").exists() or row["name"] not in machines.registry.agents:
            write_atomically(token, machines.make_token(TOKEN_S)[1] + "\n")
        command = [sys.executable, "-m", "shoal.cli.main", "agent", "--join", machines.address]
        command += ["--token-file", str(token), "--name", row["name"], "--state", str(state)]
        command += ["--gpus", str(row["gpus"]), "--type", row["type"], "--rack", row["rack"]]
        command += ["--domain", row["domain"], "--address", address]
        with (state / "agent.log").open("ab") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd="/"
            )
        self._children.append(process)
        began = start_time(process.pid)
        if began is not None:
            write_atomically(
                state / "process.json", msgspec.json.encode(Started(process.pid, began)).decode()
            )

    def _running(self, name: str) -> int | None:
        """The pid of the node's agent, if it runs."""
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            found = msgspec.json.decode((self._directory / name / "process.json").read_bytes(), type=Started)
            if start_time(found.pid) == found.start_time:
                return found.pid
        return None

    def _signal(self, name: str, number: signal.Signals) -> bool:
        pid = self._running(name)
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        return pid is not None

    async def stop(self) -> None:
        """End all agents. No worker runs any more."""
        names = [path.name for path in self._directory.glob("*")]
        for number in (signal.SIGTERM, signal.SIGKILL):
            for name in names:
                self._signal(name, number)
            deadline_s = asyncio.get_running_loop().time() + END_S
            while any(self._running(name) is not None for name in names):
                if asyncio.get_running_loop().time() > deadline_s:
                    break
                self._reap()
                await asyncio.sleep(0.05)
        self._reap()

    def _reap(self) -> None:
        """Agents that this process started are its children, and stay as zombies until it waits for them."""
        self._children = [child for child in self._children if child.poll() is None]
