"""Two agents as processes on 127.0.0.2 and 127.0.0.3, with the control plane's executor in the test."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.agents.agent import Agent, node_facts
from shoal.agents.certificate import fingerprint_of, make_certificate, server_context
from shoal.agents.fleet import AgentExecutor
from shoal.agents.fleet_records import Timing
from shoal.agents.link import MemoryLink
from shoal.agents.registry import AgentRegistry
from shoal.executors.base import Exit, NodeLost, NodeUnreachable, NodeUp, WorkerSpec
from shoal.executors.keeper import start_time
from shoal.executors.local import LocalExecutor

TIMING = Timing(lease_s=6.0, heartbeat_s=0.5, silence_s=3.0, keeper_margin_s=3.0)
COUNT = "i=0; while true; do echo $i; i=$((i+1)); sleep 0.05; done"


class Cluster:
    """A control plane that can restart, and agents that can be killed."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.certificate, self.key = directory / "cert.pem", directory / "key.pem"
        make_certificate(self.certificate, self.key)
        self.address, self.port = "", 0
        self.exits: dict[str, Exit] = {}
        self.events: list[Any] = []
        self.agents: dict[str, subprocess.Popen[bytes]] = {}

    async def up(self, timing: Timing = TIMING) -> None:
        registry = AgentRegistry(self.directory / "agents.json")
        self.registry = registry
        self.executor = AgentExecutor(registry, timing=timing, on_node=self.events.append)
        self.executor.on_exit = self.exited
        for path in sorted((self.directory / "jobs").glob("*")):
            if path.name not in self.exits:
                self.executor.adopt(path.name, path)
        context = server_context(self.certificate, self.key)
        self.address = await self.executor.listen("127.0.0.1", self.port, context)
        self.port = int(self.address.rpartition(":")[2])

    def exited(self, exit_: Exit) -> None:
        assert exit_.worker not in self.exits
        self.exits[exit_.worker] = exit_

    def agent(self, name: str, address: str, state: str | None = None, gpus: int = 2) -> None:
        token = self.directory / f"{state or name}.token"
        if not token.exists():
            made = self.registry.create_token(fingerprint_of(self.certificate), time.time(), 60)
            token.write_text(str(made))
        command = [sys.executable, str(Path(__file__).with_name("run_agent.py"))]
        arguments = [
            str(self.directory / (state or name)),
            name,
            address,
            self.address,
            str(token),
            str(gpus),
        ]
        self.agents[state or name] = subprocess.Popen([*command, *arguments], stderr=subprocess.DEVNULL)

    async def node(self, name: str) -> None:
        await until(lambda: any(n.name == name for n in self.executor.nodes()))

    def start(self, worker: str, node: str, script: str, **options: Any) -> Path:
        directory = self.directory / "jobs" / worker
        spec: dict[str, Any] = {"workdir": "/tmp", "env": {}, "grace_s": 5.0, **options}
        self.executor.start(WorkerSpec(worker, directory, node, 0, ("sh", "-c", script), **spec))
        return directory

    def keeper_file(self, node: str, worker: str) -> dict[str, Any]:
        return json.loads((self.directory / node / "workers" / worker / "started").read_text())

    async def pid(self, node: str, worker: str) -> int:
        return int((await until(lambda: self.keeper_file(node, worker)))["pid"])

    def lines(self, worker: str) -> list[str]:
        found, begin = [], 0
        while lines := self.executor.logs(self.directory / "jobs" / worker, begin):
            found += [line.text for line in lines]
            begin = lines[-1].end
        return found

    async def down(self) -> None:
        started = [path.name for path in (self.directory / "jobs").glob("*")]
        with_agents = [w for w in started if w not in self.exits]
        for worker in with_agents:
            self.executor.stop(worker, kill=True)
        connected = {n.name for n in self.executor.nodes()}
        if connected:
            await until(lambda: all(w in self.exits or not self._on(w, connected) for w in with_agents))
        self.executor.close()
        for process in self.agents.values():
            process.kill()
            process.wait()

    def _on(self, worker: str, nodes: set[str]) -> bool:
        return (self.directory / "jobs" / worker / "node").read_text() in nodes


async def until(what: Callable[[], Any], limit_s: float = 40.0) -> Any:
    end_s = time.monotonic() + limit_s
    while time.monotonic() < end_s:
        try:
            if found := what():
                return found
        except (OSError, ValueError):
            pass
        await asyncio.sleep(0.02)
    raise AssertionError("it did not come to pass")


def run(directory: Path, story: Callable[[Cluster], Awaitable[None]], timing: Timing = TIMING) -> None:
    async def limited() -> None:
        cluster = Cluster(directory)
        await cluster.up(timing)
        try:
            await asyncio.wait_for(story(cluster), 120)
        finally:
            await cluster.down()

    asyncio.run(limited())


def alive(pid: int) -> bool:
    return start_time(pid) is not None


def state_of(pid: int) -> str:
    stat = Path(f"/proc/{pid}/stat").read_text()
    return stat[stat.rindex(")") + 2]


def test_workers_on_two_nodes_start_stop_suspend_and_wake(tmp_path: Path) -> None:
    async def story(cluster: Cluster) -> None:
        cluster.agent("a", "127.0.0.2")
        cluster.agent("b", "127.0.0.3", gpus=3)
        await cluster.node("a")
        await cluster.node("b")
        assert {n.name: n.gpus for n in cluster.executor.nodes()} == {"a": 2, "b": 3}
        cluster.start("1.0", "a", "echo $SHOAL_HOST; exit 7")
        cluster.start("1.1", "b", "echo $SHOAL_HOST; seq 20000; printf end")
        cluster.start("1.2", "b", COUNT)
        cluster.start("1.3", "a", "seq 100000")  # more than may be on the way at once
        cluster.start("1.4", "a", "true", workdir=str(tmp_path / "only-elsewhere"))
        await until(lambda: {"1.0", "1.1", "1.3", "1.4"} <= set(cluster.exits))
        assert cluster.exits["1.4"].code == 127
        absent = f"the working directory '{tmp_path}/only-elsewhere' does not exist on node a"
        assert cluster.exits["1.4"].why.startswith(absent)
        assert "--upload" in cluster.exits["1.4"].why
        assert cluster.exits["1.0"].code == 7
        assert cluster.lines("1.0") == ["127.0.0.2"]
        assert cluster.lines("1.1") == ["127.0.0.3", *map(str, range(1, 20001)), "end"]
        pid = await cluster.pid("b", "1.2")
        cluster.executor.suspend("1.2")
        await until(lambda: state_of(pid) == "T")
        cluster.executor.wake("1.2")
        await until(lambda: state_of(pid) != "T")
        cluster.executor.stop("1.2")
        await until(lambda: "1.2" in cluster.exits)
        assert cluster.exits["1.2"].asked_to_end
        assert not alive(pid)
        await until(lambda: not list((tmp_path / "b" / "workers").iterdir()))  # forgotten
        assert cluster.lines("1.3") == [*map(str, range(1, 100_001))]

    run(tmp_path, story)


def test_a_killed_agent_returns_and_its_workers_have_gone_on(tmp_path: Path) -> None:
    async def story(cluster: Cluster) -> None:
        cluster.agent("a", "127.0.0.2")
        await cluster.node("a")
        cluster.start("1.0", "a", COUNT)
        pid = await cluster.pid("a", "1.0")
        cluster.agents["a"].kill()
        cluster.agents["a"].wait()
        await until(lambda: any(isinstance(e, NodeUnreachable) for e in cluster.events))
        cluster.executor.stop("1.0")  # not lost, though nobody hears it now
        assert alive(pid)
        cluster.agent("a", "127.0.0.2", gpus=4)  # with its own secret, and with other GPUs
        await until(lambda: "1.0" in cluster.exits)
        assert cluster.exits["1.0"].asked_to_end
        lines = cluster.lines("1.0")
        assert lines == [str(i) for i in range(len(lines))]
        assert [e.node.gpus for e in cluster.events if isinstance(e, NodeUp)] == [2, 4]

    run(tmp_path, story)


def test_a_control_plane_that_restarts_takes_its_workers_over(tmp_path: Path) -> None:
    async def story(cluster: Cluster) -> None:
        cluster.agent("a", "127.0.0.2")
        await cluster.node("a")
        cluster.start("1.0", "a", COUNT)
        cluster.start("1.1", "a", "sleep 0.5; echo done")
        pid = await cluster.pid("a", "1.0")
        await until(lambda: len(cluster.lines("1.0")) > 3)
        cluster.executor.close()
        await asyncio.sleep(0)
        await cluster.up()
        await cluster.node("a")
        await until(lambda: "1.1" in cluster.exits)
        assert cluster.lines("1.1") == ["done"]
        before = len(cluster.lines("1.0"))
        await until(lambda: len(cluster.lines("1.0")) > before + 3)
        assert alive(pid)
        lines = cluster.lines("1.0")
        assert lines == [str(i) for i in range(len(lines))]
        assert "1.0" not in cluster.exits

    run(tmp_path, story)


def test_a_worker_that_was_killed_when_the_lease_ended_is_reported_as_lost_with_its_node(
    tmp_path: Path,
) -> None:
    timing = Timing(lease_s=2.0, heartbeat_s=0.3, silence_s=1.5, keeper_margin_s=60.0)

    async def story() -> None:
        cluster = Cluster(tmp_path)
        await cluster.up(timing)
        try:
            cluster.agent("a", "127.0.0.2")
            await cluster.node("a")
            cluster.start("1.0", "a", "exec sleep 1000")
            await cluster.pid("a", "1.0")
            cluster.executor.close()
            await until((tmp_path / "a" / "workers" / "1.0" / "exit").exists)
            await cluster.up(
                timing
            )  # the agent returns before the margin for keepers has passed, and reports the end
            await until(lambda: "1.0" in cluster.exits)
        finally:
            await cluster.down()
        ended = cluster.exits["1.0"]
        assert ended.node_lost
        assert "lease of its node ended" in ended.why

    asyncio.run(asyncio.wait_for(story(), 120))


def test_no_worker_of_a_stopped_agent_is_alive_when_its_end_is_reported(tmp_path: Path) -> None:
    async def story(cluster: Cluster) -> None:
        cluster.agent("a", "127.0.0.2")
        await cluster.node("a")
        cluster.start("1.0", "a", "trap '' TERM; " + COUNT)
        pid = await cluster.pid("a", "1.0")
        os.kill(cluster.agents["a"].pid, signal.SIGSTOP)
        seen: list[bool] = []
        report = cluster.executor.on_exit
        cluster.executor.on_exit = lambda e: (seen.append(alive(pid)), report(e))[0]
        await until(lambda: any(isinstance(e, NodeUnreachable) for e in cluster.events))
        assert alive(pid)
        assert not cluster.exits
        cluster.start("1.1", "a", COUNT)  # it waits for the agent, which will not return in time
        await until(lambda: {"1.0", "1.1"} <= set(cluster.exits))
        assert seen == [False, False]
        assert "node lost" in cluster.exits["1.0"].why
        assert any(isinstance(e, NodeLost) for e in cluster.events)
        os.kill(cluster.agents["a"].pid, signal.SIGCONT)
        await cluster.node("a")
        await until(lambda: not list((tmp_path / "a" / "workers").iterdir()))
        assert not alive(pid)

    run(tmp_path, story)


def test_a_second_agent_waits_while_one_of_its_name_is_silent(tmp_path: Path) -> None:
    """As after a crash of the first one's machine. An agent whose name is taken by one that speaks is sent away."""

    async def story(cluster: Cluster) -> None:
        cluster.agent("a", "127.0.0.2")
        await cluster.node("a")
        cluster.agents["a"].send_signal(signal.SIGSTOP)
        cluster.agent("a", "127.0.0.3", state="other", gpus=5)
        await until(lambda: cluster.executor.refusals.recent(time.time()))
        assert [n.gpus for n in cluster.executor.nodes()] == [2]
        cluster.agents["a"].kill()
        cluster.agents["a"].wait()
        await until(lambda: [n.gpus for n in cluster.executor.nodes()] == [5])

    run(tmp_path, story, Timing(lease_s=60.0, heartbeat_s=0.5, silence_s=60.0, keeper_margin_s=3.0))


def test_the_embedded_agent_uses_the_same_messages_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        executor = AgentExecutor(AgentRegistry(tmp_path / "agents.json"), timing=TIMING)
        exits: list[Exit] = []
        executor.on_exit = exits.append
        local = LocalExecutor(2)

        async def connect() -> MemoryLink:
            ours, theirs = MemoryLink.pair()
            executor.embed(theirs)
            return ours

        nodes = node_facts("local", local.nodes(), "127.0.0.1", None, "rack0", "domain0")
        agent = Agent("local", tmp_path / "agent", local, nodes, connect, embedded=True)
        task = asyncio.create_task(agent.run())
        await until(executor.nodes)
        directory = tmp_path / "jobs" / "1.0"
        executor.start(WorkerSpec("1.0", directory, "local", 0, ("sh", "-c", "echo hello"), "/tmp", {}))
        await until(lambda: exits)
        assert exits[0].ok
        assert [line.text for line in executor.logs(directory, 0)] == ["hello"]
        # A fault in the start of one worker ends neither the agent nor the next worker.
        with monkeypatch.context() as patched:
            patched.setattr(local, "start", lambda worker: [][1])
            executor.start(WorkerSpec("1.1", tmp_path / "jobs" / "1.1", "local", 0, ("true",), "/tmp", {}))
            await until(lambda: len(exits) == 2)
        assert (exits[1].worker, exits[1].began) == ("1.1", False)
        assert exits[1].why == "cannot start it: list index out of range"
        executor.start(WorkerSpec("1.2", tmp_path / "jobs" / "1.2", "local", 0, ("true",), "/tmp", {}))
        await until(lambda: len(exits) == 3)
        assert exits[2].ok
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        executor.close()

    asyncio.run(story())
