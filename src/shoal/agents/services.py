"""What agents exchange with the control plane besides orders: archives of working directories, and proofs of what
their machines share and reach.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from shoal.agents.reaching import Reaching
from shoal.agents.shared import SharedProof, Sharing
from shoal.wire import agent_messages as am

Request = am.FetchTree | am.Probed | am.Listening | am.Reached


class AgentServices:
    """The control plane's side. Files are read in other threads: a slow disk must not delay decisions."""

    def __init__(
        self,
        find_tree: Callable[[str], Path | None] = lambda digest: None,
        proof: SharedProof | None = None,
        addresses: Callable[[], tuple[str, ...]] = tuple,
    ) -> None:
        """`find_tree`: the archive of a content. `addresses`: where workers connect to."""
        self._find_tree, self.proof, self._addresses = find_tree, proof, addresses
        #: The addresses that workers on an agent's machine cannot reach, and why.
        self.unreachable: dict[str, dict[str, str]] = {}
        self.reaching = Reaching()

    def connected(self, agent: str) -> list[am.Probe]:
        """What to ask an agent that has just connected."""
        self.reaching.forget(agent)
        if self.proof is None:
            return []
        self.proof.forget(agent)
        self.unreachable.pop(agent, None)
        return [self.proof.probe(self._addresses())]

    async def answer(self, agent: str, request: Request) -> am.TreePart | None:
        if isinstance(request, am.FetchTree):
            return await asyncio.to_thread(self._part, request)
        if isinstance(request, am.Listening | am.Reached):
            self.reaching.answered(agent, request)
        elif self.proof is not None:
            self.unreachable[agent] = request.unreachable
            await asyncio.to_thread(self.proof.answered, agent, request)
        return None

    def _part(self, request: am.FetchTree) -> am.TreePart:
        path = self._find_tree(request.digest)
        try:
            if path is None:
                raise FileNotFoundError(2, "the server has it no more: submit the job again")
            with path.open("rb") as file:
                size_bytes = file.seek(0, 2)
                file.seek(request.begin)
                data = file.read(am.TREE_PART_BYTES)
        except OSError as error:
            return am.TreePart(request.digest, request.begin, why=error.strerror or str(error))
        return am.TreePart(request.digest, request.begin, size_bytes, data)

    def sharing(self, agent: str) -> Sharing | None:
        """Whether the agent's machine shares the directory of the jobs' state. None: not known yet."""
        return None if self.proof is None else self.proof.of(agent)
