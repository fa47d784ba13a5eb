"""The vote that ends each step: an all-reduce of one number per member.

It completes only if every member entered it, and a member enters it only with complete gradients. It has one element,
because each further one costs gloo another round: 0.2 ms for one, 0.4 ms for three between two workers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

COUNT_BITS = 12
MOST = (1 << COUNT_BITS) - 1
"""The most members of a generation; the numbers of generations have the rest of 63 bits."""


def ballot(flag: int, fits: bool) -> int:
    """`flag`: the generation this member is ready to switch to, or 0. `fits`: one window is enough for the rest."""
    return (flag > 0) + (int(fits) << COUNT_BITS) + (flag << 2 * COUNT_BITS)


def count(ballots: int) -> tuple[int, int, int]:
    """Of the sum of all ballots: how many raised a flag, for how many the rest fits, and the sum of the flags."""
    return ballots & MOST, (ballots >> COUNT_BITS) & MOST, ballots >> 2 * COUNT_BITS


class Voters(Protocol):
    """The members that vote: a `Session`."""

    @property
    def contributors(self) -> tuple[int, ...]: ...

    @property
    def world_size(self) -> int: ...

    @property
    def vote_group(self) -> Any: ...

    def flag(self) -> int:
        """The generation this member is ready to switch to, or 0."""
        ...

    def agree(self, flag: int) -> None:
        """All members are ready to switch to this generation after this step."""
        ...

    def wait(self, work: Any) -> bool:
        """Whether a collective completed."""
        ...


class Vote:
    def __init__(self, voters: Voters) -> None:
        self._voters = voters
        self._ballots = torch.zeros(1, dtype=torch.int64)
        self._early: Any = None
        self._early_flag = 0
        #: The generation in which this worker, a newcomer, has voted before it took part in a step.
        self.early_generation = 0
        #: Whether all contributors said in the last vote that one window is enough for the rest.
        self.rest_fits = False

    def cast(self, fits: Callable[[int], bool]) -> bool:
        """Vote and wait for the result. False: the vote broke. `fits` is asked with this member's flag."""
        flag = self._voters.flag()
        self._ballots.fill_(ballot(flag, fits(flag)))
        return self.tally(self._voters.vote_group.allreduce([self._ballots]), flag)

    def tally(self, work: Any, flag: int) -> bool:
        if not self._voters.wait(work):
            return False
        raised, fitting, total = count(int(self._ballots))
        self.rest_fits = fitting == len(self._voters.contributors)
        size = self._voters.world_size
        if flag and raised == size and total == size * flag:
            self._voters.agree(flag)
        return True

    @property
    def is_cast_early(self) -> bool:
        return self._early is not None

    def cast_early(self, group: Any, generation: int) -> None:
        """For a newcomer: vote for the coming step now, so that the others do not wait for this worker."""
        self._early_flag, self.early_generation = self._voters.flag(), generation
        self._ballots = torch.tensor([ballot(self._early_flag, fits=False)])
        self._early = group.allreduce([self._ballots])

    def take_early(self) -> Callable[[], bool]:
        """The count of the early vote, to be called once. It is over for this step even if it is not counted."""
        work, self._early = self._early, None
        return lambda: self.tally(work, self._early_flag)

    def discard(self) -> None:
        """The generation broke or its plan was dropped: its vote may still write into its memory."""
        self._ballots = torch.zeros_like(self._ballots)
        self._early, self.early_generation = None, 0
