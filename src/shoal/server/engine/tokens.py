"""Which join token belongs to which machine, in the store.

A machine may wait in the engine's queue for days, so its token lives long. It is removed when the machine is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from shoal.engines.base import Machine, MachineState

KEY = "engine_machines"
LIFETIME_S = 30 * 86400.0


class MachineTokens:
    """Every change is on disk when the call returns. Each method returns the tokens to remove."""

    lifetime_s = LIFETIME_S

    def __init__(self, saved: dict[str, Any] | None, save: Callable[[dict[str, Any]], None]) -> None:
        saved = saved or {}
        #: Token and agent by machine. A machine that a killed server requested has no token here.
        self._machines: dict[str, list[str]] = dict(saved.get("machines", {}))
        #: Tokens that were made, and whose machine is not known.
        self._loose: list[str] = list(saved.get("loose", []))
        self._save = save

    @property
    def agents(self) -> set[str]:
        return {agent for _, agent in self._machines.values()}

    def _write(self) -> None:
        self._save({"machines": self._machines, "loose": self._loose})

    def made(self, tokens: Iterable[str]) -> None:
        """These tokens were made for machines that are requested next."""
        self._loose += tokens
        self._write()

    def assigned(self, machines: Sequence[Machine], tokens: Sequence[str]) -> list[str]:
        """The engine has accepted these machines, with the first of these tokens."""
        for machine, token in zip(machines, tokens):
            self._machines[machine.id] = [token, machine.agent]
        self._loose = [token for token in self._loose if token not in tokens]
        self._write()
        return list(tokens[len(machines) :])

    def update(self, found: Sequence[Machine]) -> list[str]:
        """The engine lists these machines."""
        here = {m.id: m for m in found if m.state is not MachineState.GONE}
        unknown = here.keys() - self._machines.keys()
        dropped = [token for i, (token, _) in self._machines.items() if i not in here and token]
        kept = {i: row for i, row in self._machines.items() if i in here}
        kept |= {i: ["", here[i].agent] for i in unknown}
        # A machine without a known token has one of the loose ones: they stay until all such machines are gone.
        loose = self._loose if any(not token for token, _ in kept.values()) else []
        dropped += [token for token in self._loose if token not in loose]
        if kept != self._machines or loose != self._loose:
            self._machines, self._loose = kept, loose
            self._write()
        return dropped

    def forget_all(self) -> list[str]:
        dropped = [token for token, _ in self._machines.values() if token] + self._loose
        self._machines, self._loose = {}, []
        self._write()
        return dropped
