"""The interface of a policy: a rule that gives every active job a share, with its state as plain data."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import numpy as np

from shoal.core.arrays import FloatArray, IntArray
from shoal.core.decision import Decision
from shoal.core.options import NoOptions
from shoal.core.reason import Code
from shoal.core.supply import Supply
from shoal.core.view import View


class Policy(ABC):
    """Subclass this (or `CountPolicy`) and register the class in the entry point group `shoal.policies`.

    A policy reads no clock and does no I/O. All state that it keeps between decisions is in `state()` and in its
    columns. A restored policy decides exactly like the one that was saved.
    """

    name: ClassVar[str]
    #: One line for `shoal policy ls`.
    summary: ClassVar[str] = ""
    #: Columns of the view for the policy's own state of each job. `view.column(name)` returns one.
    columns: ClassVar[tuple[str, ...]] = ()
    #: Whether it resizes jobs within their range. Otherwise a job gets its requested size or nothing.
    elastic: ClassVar[bool] = True
    #: Whether it uses the amount of work left.
    needs_lengths: ClassVar[bool] = False
    #: Whether it can decide on jobs of unknown length.
    takes_unknown_lengths: ClassVar[bool] = True
    #: Whether shares of users follow their tickets, and shares of one user's jobs their weights.
    uses_tickets: ClassVar[bool] = False
    uses_weights: ClassVar[bool] = False
    #: Whether shares depend on the speed curves of the jobs, so that it helps to measure jobs at other sizes.
    uses_speeds: ClassVar[bool] = False
    #: A frozen dataclass. Each field is an option with its default.
    Options: ClassVar[type[Any]] = NoOptions
    #: Options of earlier versions that have no effect any more. They are accepted, so that saved settings stay valid.
    removed_options: ClassVar[tuple[str, ...]] = ()

    def __init__(self, options: Any = None, *, rng: np.random.Generator | None = None) -> None:
        self.options = self.Options() if options is None else options
        self.rng = np.random.default_rng(0) if rng is None else rng

    @property
    def uses_lengths(self) -> bool:
        """Whether the known length of a job changes its share."""
        return self.needs_lengths

    @property
    def quantum(self) -> str | None:
        """How long jobs keep their GPUs before others get a turn, as a sentence; None without such a time."""
        return None

    @property
    def backfills(self) -> bool:
        """Whether a later job may start before one that does not fit."""
        return True

    @abstractmethod
    def decide(self, view: View, supply: Supply, now_s: float) -> Decision:
        """The share of every row at `now_s`."""

    def wish_gpus(self, view: View) -> IntArray:
        """The share that each job would get if it were alone. A job with less gets a reason."""
        return view.max_gpus if self.elastic else view.requested_gpus

    def evidence(self, view: View, row: int, now_s: float) -> dict[str, float | int | str]:
        """The policy's numbers behind a job's share, for `shoal why`."""
        return {}

    def report(self) -> dict[str, Any]:
        """Further results of this policy for the report of a run (trades, migrations, ...), as plain data."""
        return {}

    def traded(self) -> FloatArray | None:
        """[user, type] GPUs that users gain or lose by trading now, for the fairness ledger; None without trading."""
        return None

    def entitled(self) -> FloatArray | None:
        """[user, type] GPUs that users are entitled to now, if the policy computes this itself."""
        return None

    def joined(self, job_id: int, now_s: float) -> None:
        """Called when a job becomes active. Most policies ignore it."""

    def left(self, job_id: int, now_s: float) -> None:
        """Called when a job has left."""

    def state(self) -> dict[str, Any]:
        """The state of the policy as plain data that JSON can represent."""
        return {"rng": self.rng.bit_generator.state}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a saved state."""
        self.rng.bit_generator.state = state["rng"]


class CountPolicy(Policy):
    """A policy that decides numbers of GPUs and does not choose GPU types.

    On a cluster with several types, `gpu_types.give_types` turns the numbers into GPUs of one type per job: each
    job, in order of submission, takes the fastest type for it among those with enough GPUs left. GPUs that are
    then idle go to waiting jobs, in the same order.
    """

    @abstractmethod
    def shares(self, view: View, gpus: int, now_s: float) -> IntArray:
        """The number of GPUs of every row; their sum is at most `gpus`."""

    def wake_s(self, view: View, shares: IntArray, now_s: float) -> float:
        """When to decide again even if no event occurs."""
        return np.inf

    def decide(self, view: View, supply: Supply, now_s: float) -> Decision:
        shares = self.shares(view, supply.total_gpus, now_s)
        if len(supply.gpus_of_type) == 1 or not len(view):
            return Decision(shares, wake_s=self.wake_s(view, shares, now_s))
        from shoal.policies.gpu_types import give_types

        gpus, gpu_type, codes = give_types(
            view,
            shares,
            supply.gpus_of_type,
            self.wish_gpus(view),
            resize=self.elastic,
            backfill=self.backfills,
        )
        return Decision(gpus, gpu_type, wake_s=self.wake_s(view, gpus, now_s), codes=codes)


NO_CODE = np.int8(Code.NONE)
