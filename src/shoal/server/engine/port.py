"""What the engine's driver needs of the rest of the control plane."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from shoal.engines.capacity import Demand

#: The type of GPUs of which the engine does not know the type.
UNTYPED = "gpu"


@dataclass(frozen=True, slots=True)
class AgentSeen:
    """An agent as the control plane sees it."""

    name: str
    connected: bool
    #: Some of its workers may be alive.
    may_have_workers: bool
    gpus: int = 0
    #: GPUs that jobs have or were given.
    used_gpus: int = 0
    #: Why no job gets GPUs there, apart from what the engine's driver itself has decided. Empty: jobs do.
    blocked: str = ""
    #: A person drained it.
    drained: bool = False
    #: In how many seconds its machine goes away, as was announced. None: it stays.
    leaves_in_s: float | None = None


class ClusterPort(Protocol):
    @property
    def address(self) -> str:
        """Where agents connect to."""

    def agents(self) -> Mapping[str, AgentSeen]:
        """All agents that are known, by name."""

    def demand(self, most_gpus: int) -> Sequence[Demand]:
        """GPUs that jobs would take at once. It may stop counting at `most_gpus`."""

    def expect(self, most_gpus: Mapping[str, int]) -> None:
        """All machines of the engine together could have so many GPUs of each type."""

    def keep_off(self, agents: Mapping[str, str]) -> None:
        """Use the nodes of these agents no longer, each for a reason, and those of all others again."""

    def leaving(self, agent: str, in_s: float, why: str) -> None:
        """The agent's machine goes away in so many seconds."""

    def stays(self, agent: str) -> None:
        """The agent's machine does not go away after all."""

    def fenced(self, agent: str, why: str) -> None:
        """No process of the agent or its workers is alive: the engine has ended them."""

    def make_token(self, lifetime_s: float) -> tuple[str, str]:
        """A new join token: its id, and the token itself."""

    def drop_token(self, token_id: str) -> None: ...

    def record(self, type: str, message: str, **data: object) -> None:
        """Put an event on record."""
