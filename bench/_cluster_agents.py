"""Many agents in one process, with workers that do nothing but speak the real protocol. For bench/cluster.py.

    python bench/_cluster_agents.py DIRECTORY CONTROL_ADDRESS GPUS_PER_NODE < join tokens, one for each agent

It ends with its input. Before that, each line `end` lets one job of a fixed size end.
"""

from __future__ import annotations

import asyncio
import random
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from server.fakes import Fleet
from shoal.agents.agent import Agent, node_facts
from shoal.agents.join_tokens import JoinToken
from shoal.agents.joining import Membership
from shoal.executors.base import Executor, Exit, NodeInfo, WorkerSpec

STEP_S = 0.5


class NodeOfFleet:
    """One node of a fleet as an executor of its own. The workers of a job are spread over several."""

    name = "fake"

    def __init__(self, fleet: Fleet, node: NodeInfo, owner: dict[str, NodeOfFleet]) -> None:
        self._fleet, self._node, self._owner = fleet, node, owner
        self.on_exit: Callable[[Exit], None] = lambda exit_: None
        self.on_node: Callable[[Any], None] = lambda change: None

    def nodes(self) -> tuple[NodeInfo, ...]:
        return (self._node,)

    def start(self, worker: WorkerSpec) -> None:
        self._owner[worker.worker] = self
        self._fleet.start(worker)

    def logs(self, *_: object) -> list[Any]:
        return []

    def tail_position(self, *_: object) -> int:
        return 0

    def close(self) -> None:
        pass

    def __getattr__(self, verb: str) -> Any:
        return getattr(self._fleet, verb)


def make_agents(directory: Path, control: str, gpus: int, tokens: list[str]) -> tuple[Fleet, list[Agent]]:
    nodes = tuple(NodeInfo(f"n{i}", gpus, "gpu", True) for i in range(len(tokens)))
    fleet, owner = Fleet(nodes), dict[str, NodeOfFleet]()
    fleet.checks_gpus = False
    fleet.on_exit = lambda exit_: owner.pop(exit_.worker).on_exit(exit_)
    agents = []
    for node, token in zip(nodes, tokens):
        state = directory / node.name
        state.mkdir(parents=True)
        member = Membership(state, node.name, control, JoinToken.parse(token))
        executor: Executor = NodeOfFleet(fleet, node, owner)  # type: ignore[assignment]
        facts = node_facts(node.name, (node,), "127.0.0.1", None, "rack0", "domain0")
        agents.append(
            Agent(
                node.name, state, executor, facts, member.connect,
                save_credential=member.save,
            )
        )  # fmt: skip
    return fleet, agents


async def train(fleet: Fleet, wanted: list[str]) -> None:
    """Live jobs take a step about twice a second, and a job of a fixed size ends for each word in `wanted`."""
    stepped: dict[str, float] = {}
    rng = random.Random(0)
    while wanted[:1] != ["stop"]:
        await asyncio.sleep(0.005)
        for worker in list(fleet.live.values()):
            leads = worker.member.members[:1] == (worker.id,)
            if leads and time.monotonic() - stepped.get(worker.job, 0.0) > STEP_S:
                stepped[worker.job] = time.monotonic()
                fleet.step(int(worker.job), total=10**9)
                break
        if wanted:
            wanted.pop()
            fixed = sorted({w.partition(".")[0] for w in fleet.running if w not in fleet.live})
            if fixed:
                job = rng.choice(fixed)
                for worker_id in [w for w in fleet.running if w.partition(".")[0] == job]:
                    fleet.end(worker_id)


async def main() -> None:
    directory, control, gpus = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    tokens = sys.stdin.readline().split()
    fleet, agents = make_agents(directory, control, gpus, tokens)
    wanted: list[str] = []

    def listen() -> None:
        for line in sys.stdin:
            wanted.append(line.strip())  # noqa: PERF401
        wanted.insert(0, "stop")

    threading.Thread(target=listen, daemon=True).start()
    tasks = [asyncio.create_task(agent.run()) for agent in agents]
    await train(fleet, wanted)
    for task in tasks:
        task.cancel()


if __name__ == "__main__":
    asyncio.run(main())
