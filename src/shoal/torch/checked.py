"""Checked mode: after each change of members, all workers' states are compared bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from shoal.torch.data_order import DataOrder
from shoal.torch.replica import Replica


class Membership(Protocol):
    """The members whose states are compared: a `Session`."""

    @property
    def growing(self) -> bool: ...

    @property
    def generation(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def vote_group(self) -> Any: ...

    def wait(self, work: Any) -> bool: ...


class StateCheck:
    def __init__(
        self,
        session: Membership,
        replica: Replica,
        order: DataOrder,
        note: Callable[[str], None],
        enabled: bool,
    ) -> None:
        self._session, self._replica, self._order, self._note = session, replica, order, note
        self._enabled = enabled
        self._due = False
        self._after = -1

    def expect(self, after: int = -1) -> None:
        """In this generation, compare once more than `after` steps are done and newcomers hold the state."""
        self._due, self._after = self._enabled and self._session.world_size > 1, after

    def run_if_due(self) -> None:
        """Between two steps. All members reach it after the same step."""
        if self._due and not self._session.growing and self._order.position.step > self._after:
            self._due = False
            self._compare()

    def _compare(self) -> None:
        digest = self._replica.state.digest((self._order.position, self._order.rule))
        mine = torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(torch.int64)
        # All values are equal exactly if n times the sum of the squares is the square of the sum.
        both = torch.cat([mine, mine * mine])
        if not self._session.wait(self._session.vote_group.allreduce([both])):
            return  # it broke for another reason, which the next step finds
        size, generation = self._session.world_size, self._session.generation
        total, squares = both[: len(mine)], both[len(mine) :]
        if not torch.equal(squares * size, total * total):
            raise RuntimeError(
                f"generation {generation}: the members' states differ: "
                "is all that the script keeps (schedules, scalers, averages) in job.state?"
            )
        self._note(f"generation {generation}: state verified bit for bit on {size} members")
