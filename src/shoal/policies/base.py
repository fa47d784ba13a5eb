"""What a policy is: a rule that gives every active job a share, and what it must remember as plain data."""

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
    """Subclass this (or `CountPolicy`) and name the class in the entry point group `shoal.policies`.

    A policy reads no clock and does no I/O. What it must remember between decisions is in `state()`; a
    policy restored from it decides exactly as the one that was saved.
    """

    name: ClassVar[str]
    #: One line for `shoal policy ls` and `--help`.
    summary: ClassVar[str] = ""
    #: Columns of the view in which the policy keeps its own state of each job: read them with `view.column(name)`.
    columns: ClassVar[tuple[str, ...]] = ()
    #: Whether jobs are resized within their range; otherwise they get the requested size or nothing.
    elastic: ClassVar[bool] = True
    #: Whether it must know how much work is left.
    needs_lengths: ClassVar[bool] = False
    #: Whether it can decide on jobs that nobody knows the length of.
    takes_unknown_lengths: ClassVar[bool] = True
    #: A frozen dataclass; each field is an option with its default.
    Options: ClassVar[type[Any]] = NoOptions

    def __init__(self, options: Any = None, *, rng: np.random.Generator | None = None) -> None:
        self.options = self.Options() if options is None else options
        self.rng = np.random.default_rng(0) if rng is None else rng

    @property
    def backfills(self) -> bool:
        """Whether a job may pass others that do not fit."""
        return True

    @abstractmethod
    def decide(self, view: View, supply: Supply, now_s: float) -> Decision:
        """The share of every row, at this moment."""

    def wish_gpus(self, view: View) -> IntArray:
        """What each job would get if it were alone: the bound below which it is owed a reason."""
        return view.max_gpus if self.elastic else view.requested_gpus

    def evidence(self, view: View, row: int, now_s: float) -> dict[str, float | int | str]:
        """The policy's own numbers behind a job's share, for `why`."""
        return {}

    def report(self) -> dict[str, Any]:
        """What else a run should tell of this policy (trades, migrations, ...), as plain data."""
        return {}

    def traded(self) -> FloatArray | None:
        """[user, type] GPUs won and lost by trading now, for the fairness ledger; None without trades."""
        return None

    def entitled(self) -> FloatArray | None:
        """[user, type] GPUs that users are due now, where the policy reckons it itself."""
        return None

    def joined(self, job_id: int, now_s: float) -> None:
        """A job has become active. Most policies need not know."""

    def left(self, job_id: int, now_s: float) -> None:
        """A job has gone."""

    def state(self) -> dict[str, Any]:
        """What must be remembered, as plain data (JSON-able)."""
        return {"rng": self.rng.bit_generator.state}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a saved state."""
        self.rng.bit_generator.state = state["rng"]


class CountPolicy(Policy):
    """A policy that gives out GPUs by number only and leaves types to the general rule.

    On a cluster with one type of GPU `shares` is all there is. On a mixed cluster the numbers are turned
    into GPUs of one type per job: each job, in order of submission, takes the type that is fastest for it
    among those with enough GPUs left; what then is idle goes to jobs that wait, in the same order.
    """

    @abstractmethod
    def shares(self, view: View, gpus: int, now_s: float) -> IntArray:
        """GPUs for every row, out of `gpus` in all."""

    def wake_s(self, view: View, shares: IntArray, now_s: float) -> float:
        """When to decide again though nothing happens."""
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
