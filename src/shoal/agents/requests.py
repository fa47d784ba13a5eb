"""What an agent asks the control plane for, and how it answers its questions: archives, and probes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from shoal.agents.prepared import job_of
from shoal.agents.reaching import Greeter
from shoal.agents.shared import answer_probe
from shoal.agents.trees import TreeFetcher, Workdirs
from shoal.executors.base import RunAs
from shoal.wire import agent_messages as am


class AgentRequests:
    """The agent's side of `AgentServices`."""

    def __init__(self, state_directory: Path, send: Callable[[am.FromAgent], None], host: str) -> None:
        """`send` queues a message, or drops it if there is no connection. `host`: where workers listen."""
        self._send, self._workers = send, state_directory / "workers"
        self._fetcher = TreeFetcher(state_directory / "trees", send)
        self._workdirs = Workdirs(state_directory, self._fetcher, self._jobs_here)
        self._greeter = Greeter(host, send)
        self._tasks: set[asyncio.Task[None]] = set()

    def _jobs_here(self) -> set[str]:
        return {job_of(path.name) for path in self._workers.iterdir()}

    async def workdir(self, job: str, digest: str, account: RunAs) -> Path:
        """The directory with this content for a job that runs under an account. Raises TreeError."""
        return await self._workdirs.prepare(job, digest, account)

    def connected(self) -> None:
        """The control plane has accepted the agent."""
        self._fetcher.connected()

    def close(self) -> None:
        self._greeter.close()

    def received(self, message: am.TreePart | am.Probe | am.Listen | am.Reach) -> None:
        if isinstance(message, am.TreePart):
            self._fetcher.received(message)
            return
        work = self._answer(message) if isinstance(message, am.Probe) else self._greeter.received(message)
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, probe: am.Probe) -> None:
        self._send(await asyncio.to_thread(answer_probe, probe))
