"""The agents and join tokens that the control plane knows, in one file that only its owner can read.

The file contains hashes of secrets, no secrets.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from shoal.agents.join_tokens import JoinToken, StoredToken, check_token, new_token
from shoal.wire.agent_messages import NodeFacts
from shoal.wire.atomic_file import write_atomically


class KnownAgent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    secret_hash: str
    nodes: tuple[NodeFacts, ...] = ()
    leased: bool = True


class _Contents(msgspec.Struct, forbid_unknown_fields=True):
    agents: dict[str, KnownAgent] = {}
    tokens: dict[str, StoredToken] = {}
    longest_lease_s: float = 0.0


class AgentRegistry:
    """Every change is on disk when the call returns."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._contents = (
            msgspec.json.decode(path.read_bytes(), type=_Contents) if path.exists() else _Contents()
        )

    @property
    def agents(self) -> dict[str, KnownAgent]:
        return dict(self._contents.agents)

    def remember(self, agent: str, known: KnownAgent) -> None:
        if self._contents.agents.get(agent) != known:
            self._contents.agents[agent] = known
            self._save()

    def forget(self, agent: str) -> None:
        """The agent needs a new token: the one that it joined with serves no longer, either."""
        if self._contents.agents.pop(agent, None) is not None:
            self._contents.tokens = {i: t for i, t in self._contents.tokens.items() if t.used_by != agent}
            self._save()

    def raise_longest_lease(self, lease_s: float) -> float:
        """Note that leases of this length are granted. Return the longest that was ever granted before."""
        before = self._contents.longest_lease_s
        if lease_s > before:
            self._contents.longest_lease_s = lease_s
            self._save()
        return before

    @property
    def tokens(self) -> dict[str, StoredToken]:
        return dict(self._contents.tokens)

    def create_token(self, fingerprint: str, now_s: float, lifetime_s: float) -> JoinToken:
        self._contents.tokens = {i: t for i, t in self._contents.tokens.items() if t.expires_s > now_s}
        token, stored = new_token(fingerprint, now_s, lifetime_s)
        self._contents.tokens[stored.id] = stored
        self._save()
        return token

    def remove_token(self, token: str) -> bool:
        found = self._contents.tokens.pop(token, None)
        self._save()
        return found is not None

    def check_token(self, token: str, secret: str, agent: str, now_s: float) -> None:
        """Raise TokenError if the agent may not join with the token."""
        check_token(self._contents.tokens.get(token), secret, agent, now_s)

    def use_token(self, token: str, agent: str) -> None:
        stored = self._contents.tokens[token]
        self._contents.tokens[token] = msgspec.structs.replace(stored, used_by=agent)
        self._save()

    def _save(self) -> None:
        write_atomically(self._path, msgspec.json.encode(self._contents))
