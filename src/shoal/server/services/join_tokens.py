"""Join tokens, with which agents of other machines join, and the removal of nodes that are lost."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from shoal.agents.join_tokens import StoredToken
from shoal.agents.refusals import Refusal
from shoal.core.errors import ShoalError
from shoal.core.words import counted
from shoal.server.api import models as m
from shoal.server.loop.clock import as_time
from shoal.server.machines import Machines
from shoal.server.services.errors import Conflict, NotFound
from shoal.server.services.naming import printable
from shoal.server.store.store import Store

LOST = "lost"


class NodesToRemove(Protocol):
    def show(self, name: str, only: str | None) -> m.Node: ...

    def forget(self, name: str) -> None: ...


class JoinTokens:
    def __init__(
        self, machines: Machines | None, store: Store, nodes: NodesToRemove, now_s: Callable[[], float]
    ) -> None:
        """`machines` is None for an executor without agents."""
        self._machines, self._store, self._nodes, self._now_s = machines, store, nodes, now_s

    @property
    def _known(self) -> Machines:
        if self._machines is None:
            raise Conflict("this server's executor has no agents, so no machine can join it")
        return self._machines

    async def create(
        self, expires_in_s: float, actor: str, latest_s: float | None = None
    ) -> m.JoinTokenCreated:
        """The join token expires at `latest_s` at the latest."""
        machines = self._known
        try:
            await machines.wait_until_listening()
        except (OSError, ShoalError) as error:
            raise Conflict(f"no machine can join: {error}") from None
        # API tokens and join tokens use different clocks, so compare remaining lifetimes.
        left_s = expires_in_s if latest_s is None else latest_s - self._now_s()
        token_id, token = machines.make_token(min(expires_in_s, left_s))
        with self._store.change(self._now_s(), actor=actor) as change:
            change.event("node.token", f"join token {token_id} was made", data={"token": token_id})
        stored = machines.registry.tokens[token_id]
        return m.JoinTokenCreated(**_shown(stored).model_dump(), token=token, address=machines.address)

    def all(self) -> list[m.JoinToken]:
        """Those that have not expired."""
        tokens = self._known.registry.tokens.values()
        return [_shown(token) for token in tokens if token.expires_s > time.time()]

    def remove(self, token_id: str, actor: str) -> None:
        if not self._known.registry.remove_token(token_id):
            raise NotFound(f"there is no join token {printable(token_id)!r}")
        with self._store.change(self._now_s(), actor=actor) as change:
            change.event("node.token", f"join token {token_id} was removed", data={"token": token_id})

    def refused(self) -> list[m.RefusedAgent]:
        """Agents that were refused lately."""
        if self._machines is None:
            return []
        return [
            m.RefusedAgent(
                agent=refusal.agent or None,
                address=refusal.address,
                why=refusal.why,
                at=as_time(refusal.at_s),
            )
            for refusal in self._machines.executor.refusals.recent(time.time())
        ]

    def refused_checks(self) -> list[m.Check]:
        """For `doctor`. The reason of a refusal says what to do."""
        found = [] if self._machines is None else self._machines.executor.refusals.recent(time.time())
        if not found:
            return []
        latest = found[-1]
        text = f"{counted(len(found), 'agent')} in the last day; {refused_name(latest)}: {latest.why}"
        hint = "`shoal node ls` lists them with their addresses and what to do"
        return [m.Check(name="refused agents", status="warning", message=text, hint=hint)]

    def remove_node(self, name: str, actor: str) -> None:
        """Forget a node that is lost. Its agent needs a new token to join again."""
        node = self._nodes.show(name, None)
        if node.state != LOST:
            hint = f"end its agent first, or keep jobs off it: shoal node drain {name}"
            raise Conflict(f"{name} is {node.state}, and only a node that is lost can be removed", hint)
        agent = self._known.executor.agent_of(name)
        self._nodes.forget(name)
        if agent is not None and not any(
            n.name != name for n in self._known.executor.state.agents[agent].nodes
        ):
            self._known.executor.forget(agent)
        with self._store.change(self._now_s(), actor=actor) as change:
            change.event("node.removed", f"{name} was removed by {actor}", data={"node": name})


def refused_name(refusal: Refusal) -> str:
    name = f"agent {refusal.agent}" if refusal.agent else "an agent"
    return f"{name} at {refusal.address}" if refusal.address else name


def _shown(token: StoredToken) -> m.JoinToken:
    return m.JoinToken(id=token.id, expires_at=as_time(token.expires_s), used_by=token.used_by)
