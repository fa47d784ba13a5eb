"""What a policy is: a rule that gives every active job a share, and what it must remember as plain data."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, get_type_hints

import numpy as np
from numpy.typing import NDArray

from shoal.core.cluster import Cluster
from shoal.core.errors import ShoalError, did_you_mean
from shoal.core.plan import Placement
from shoal.core.reason import Code
from shoal.core.view import View

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Supply:
    """The GPUs there are to share out now: the cluster less what is lost or taken out of use."""

    cluster: Cluster
    #: GPUs in use-able state, by type and by node.
    gpus_of_type: IntArray
    gpus_of_node: IntArray
    total_gpus: int

    @classmethod
    def of(cls, cluster: Cluster) -> Supply:
        return cls(cluster, cluster.gpus_of_type, cluster.gpus_of_node, cluster.total_gpus)

    def without(self, lost_nodes: set[int]) -> Supply:
        """What is left when these nodes are gone."""
        up = self.cluster.gpus_of_node.copy()
        up[list(lost_nodes)] = 0
        by_type = np.bincount(self.cluster.type_of_node, weights=up, minlength=len(self.gpus_of_type))
        return Supply(self.cluster, by_type.astype(np.int32), up, int(up.sum()))


@dataclass(frozen=True, slots=True)
class Decision:
    """A share for each row of the view."""

    gpus: IntArray
    #: GPU type of each share; None where there is one type only.
    gpu_type: IntArray | None = None
    #: Parameter servers of each share; None: as many as workers, for jobs that have them.
    servers: IntArray | None = None
    #: Rows for which the policy itself says where, not the placement (node-bound policies).
    placements: dict[int, Placement] | None = None
    #: When to decide again though nothing happens; a quantum ends.
    wake_s: float = np.inf
    #: Reason codes where the policy knows better than the general rule; 0 elsewhere.
    codes: NDArray[np.int8] | None = None
    #: The policy leaves GPUs idle on purpose, and says why.
    idle_because: str | None = None


@dataclass(frozen=True)
class NoOptions:
    """A policy without options."""


class Policy(ABC):
    """Subclass this (or `CountPolicy`) and name the class in the entry point group `shoal.policies`.

    A policy reads no clock and does no I/O. What it must remember between decisions is in `state()`; a
    policy restored from it decides exactly as the one that was saved.
    """

    name: ClassVar[str]
    #: One line for `shoal policy ls` and `--help`.
    summary: ClassVar[str] = ""
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
        from shoal.policies.types import give_types

        gpus, gpu_type, codes = give_types(
            view,
            shares,
            supply.gpus_of_type,
            self.wish_gpus(view),
            resize=self.elastic,
            backfill=self.backfills,
        )
        return Decision(gpus, gpu_type, wake_s=self.wake_s(view, gpus, now_s), codes=codes)


def make_options(named: Any, given: dict[str, str], what: str = "policy") -> Any:
    """Options of a policy (or of another thing with a name) from words (`quantum_s=3600`), checked by type."""
    cls = named.Options
    known = {f.name for f in dataclasses.fields(cls)}
    hints = get_type_hints(cls)
    values = {}
    for key, text in given.items():
        if key not in known:
            hint = did_you_mean(key, known) if known else "it has none"
            raise ShoalError(f"{what} {named.name!r} has no option {key!r}; {hint}")
        values[key] = _parse(f"{what} {named.name!r}", key, text, hints[key])
    return cls(**values)


def at_least_a_second(option: str, seconds: float, policy: str) -> None:
    """Jobs take turns in seconds or more: a policy that wakes up more often does hardly anything else."""
    if not seconds >= 1:
        raise ShoalError(f"option {option}={seconds:g} of policy {policy!r} must be 1 second or more")


_IN_WORDS: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    tuple[float, ...]: "numbers separated by commas",
}


def _parse(owner: str, key: str, text: str, kind: Any) -> Any:
    try:
        if kind is bool:
            return {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}[
                text.lower()
            ]
        if kind is int:
            return int(text)
        if kind is float:
            value = float(text)
            if np.isnan(value):
                raise ValueError
            return value
        if kind == tuple[float, ...]:
            parts = tuple(float(part) for part in text.split(",") if part)
            if any(np.isnan(part) for part in parts):
                raise ValueError
            return parts
        return text
    except (ValueError, KeyError):
        raise ShoalError(f"option {key}={text!r} of {owner} must be {_IN_WORDS[kind]}") from None


NO_CODE = np.int8(Code.NONE)
