"""What users are owed or owe: GPU time beyond their part of each type, on all nodes together."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.core.cluster import User
from shoal.core.compiled import kernel

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int32]


@kernel
def pass_of_jobs(
    lag: FloatArray,
    rate: FloatArray,
    user: IntArray,
    gpu_type: IntArray,
    beyond: FloatArray,
    part: FloatArray,
    least_rate: float,
    pull: float,
) -> FloatArray:
    """The pass each job goes by: its own among its user's jobs, plus `pull` times that of its user.

    The job's own is lag / rate. The user's, beyond / part, counts what it had of the type on all nodes: who
    is held short on one node is served first on the others. For users of one job on one node it is plain
    stride. Jobs without a due come after all others.
    """
    out = np.empty(len(lag))
    for i in range(len(lag)):
        u, t = user[i], max(gpu_type[i], 0)
        if rate[i] <= least_rate or part[u, t] <= 0.0:
            out[i] = 1e15 + lag[i]
        else:
            out[i] = lag[i] / rate[i] + pull * beyond[u, t] / part[u, t]
    return out


def urgency(part: FloatArray, demand: FloatArray) -> FloatArray:
    """How much more it counts to be behind for who can hardly make up for it: 1 / (1.1 - part / demand).

    A user whose jobs should run nearly all the time can have little more than its part later on.
    """
    return np.asarray(1.0 / (1.1 - np.minimum(part / np.maximum(demand, 1e-9), 1.0)))


@kernel
def settle(gpus: FloatArray, part: FloatArray, span_s: float, beyond: FloatArray) -> None:
    """Add what users had of each type beyond their part of what was given out, in `span_s` seconds.

    Of what was given out: GPUs that fell idle, as gangs did not fit, are owed by nobody.
    """
    users, types = part.shape
    for t in range(types):
        given = parts = 0.0
        for u in range(users):
            given += gpus[u, t]
            parts += part[u, t]
        given /= max(parts, 1e-12)
        for u in range(users):
            if part[u, t] > 0.0:
                beyond[u, t] += (gpus[u, t] - part[u, t] * given) * span_s


@kernel
def factors(beyond: FloatArray, part: FloatArray, over_s: float) -> FloatArray:
    """1 - beyond / (part * over_s), within 0.1 .. 10; 1 for who has no part."""
    out = np.empty(part.shape)
    for u in range(part.shape[0]):
        for t in range(part.shape[1]):
            out[u, t] = 1.0
            if part[u, t] > 0.0:
                out[u, t] = min(max(1.0 - beyond[u, t] / (part[u, t] * over_s), 0.1), 10.0)
    return out


@kernel
def keep_in_bounds(
    beyond: FloatArray, part: FloatArray, credit_s: float, debt_s: float, least: float
) -> None:
    """Nobody is owed more than `credit_s` seconds of its part, or owes more than `debt_s`, and in all nothing is owed.

    Neither bound is below `least` GPU-seconds: a small user may have to wait long for a large gang of its own. Where
    gangs keep each other out, some are ahead for ever as nobody else fits beside others; were they to owe all of it,
    it would weigh against those whom they run beside, who are behind.
    What users who have left owe to those present, or are owed, is shared out in proportion to parts: so who
    comes new stands where the others do on average. Who has no part of a type keeps what it has.
    """
    users, types = part.shape
    for t in range(types):
        total = owed = 0.0
        for u in range(users):
            if part[u, t] > 0.0:
                credit, debt = max(credit_s * part[u, t], least), max(debt_s * part[u, t], least)
                beyond[u, t] = min(max(beyond[u, t], -credit), debt)
                owed += beyond[u, t]
                total += part[u, t]
        for u in range(users):
            if part[u, t] > 0.0:
                beyond[u, t] -= part[u, t] * owed / total


@kernel
def gpus_of_users(gpus: IntArray, gpu_type: IntArray, user: IntArray, out: FloatArray) -> None:
    """GPUs that each user has of each type."""
    out[:] = 0.0
    for i in range(len(user)):
        out[user[i], max(gpu_type[i], 0)] += gpus[i]


class Accounts:
    """What users have and are due of each type since the last booking, and what that came to.

    `beyond[user, type]`, in GPU-seconds, is what the user had of a type beyond its part of what was given out
    of it, on whatever nodes.
    """

    def __init__(self, types: int) -> None:
        self.names: tuple[str, ...] = ()
        #: When was booked last; None before the first time: nobody owes for what was before this policy.
        self.since_s: float | None = None
        self._users: tuple[User, ...] = ()
        self.tickets: FloatArray = np.zeros(0)
        self.gpus: FloatArray = np.zeros((0, types))
        self.part: FloatArray = np.zeros((0, types))
        self.beyond: FloatArray = np.zeros((0, types))

    def know(self, users: tuple[User, ...]) -> None:
        """There are these users; who is new owes nothing and is owed nothing."""
        if users is self._users:
            return
        self._users = users
        self.tickets = np.array([user.tickets for user in users])
        names = tuple(user.name for user in users)
        old = [self.names.index(n) if n in self.names else -1 for n in names]
        for column in _COLUMNS:
            before = getattr(self, column)
            nothing = np.zeros((1, *before.shape[1:]))
            setattr(self, column, np.concatenate([before, nothing])[old])
        self.names = names

    def book(self, now_s: float) -> float:
        """Charge users for the time since the last booking; how long that is, in seconds."""
        span_s = 0.0 if self.since_s is None else max(now_s - self.since_s, 0.0)
        settle(self.gpus, self.part, span_s, self.beyond)
        self.since_s = now_s
        return span_s

    def corrections(self, over_s: float) -> FloatArray:
        """[user, type]: what to multiply parts with, so that who has had too little gets it back.

        1 - beyond / (part * over_s): a user a tenth of `over_s` behind is given a tenth more. A steady
        disadvantage, as of jobs on nodes that carry too much, so settles at a small debt instead of growing.
        """
        return np.asarray(factors(self.beyond, self.part, over_s))

    def go_on(
        self,
        gpus: IntArray,
        gpu_type: IntArray,
        user: IntArray,
        part: FloatArray,
        credit_s: float,
        debt_s: float,
        least: float = 0.0,
    ) -> None:
        """From now on jobs have these GPUs, and users these parts; for the bounds see `keep_in_bounds`."""
        self.part = np.array(part, np.float64)
        keep_in_bounds(self.beyond, self.part, credit_s, debt_s, least)
        gpus_of_users(gpus, gpu_type, user, self.gpus)

    def state(self) -> dict[str, Any]:
        return {
            "since_s": self.since_s,
            "users": list(self.names),
            **{column: getattr(self, column).tolist() for column in _COLUMNS},
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.since_s = state["since_s"]
        self.names = tuple(state["users"])
        for column in _COLUMNS:
            shape = (len(self.names), *getattr(self, column).shape[1:])
            setattr(self, column, np.array(state[column], np.float64).reshape(shape))


_COLUMNS = ("gpus", "part", "beyond")
