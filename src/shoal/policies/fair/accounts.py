"""What users are owed or owe: GPU time beyond their due, handed on from jobs that leave to the others."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from shoal.core.cluster import User

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int32]


@njit(cache=True)
def charge(
    lag: FloatArray,
    gpus: IntArray,
    rate: FloatArray,
    user: IntArray,
    span_s: float,
    user_lag: FloatArray,
    user_gpus: FloatArray,
    user_rate: FloatArray,
) -> None:
    """Book `span_s` seconds: jobs got `gpus` and were due `rate`; so did users, with the jobs that left.

    A user's lag is what all its jobs ever had beyond their due. What a job that has left had too much or too
    little of is shared out among the user's other jobs, now or when the next one comes: so neither does a
    stream of short jobs, each new and owed its turn, gain anything, nor does anyone lose by finishing.
    """
    n, users = len(lag), len(user_lag)
    booked, jobs = np.zeros(users), np.zeros(users)
    for i in range(n):
        lag[i] += (gpus[i] - rate[i]) * span_s
        booked[user[i]] += lag[i]
        jobs[user[i]] += 1.0
    for u in range(users):
        user_lag[u] += (user_gpus[u].sum() - user_rate[u]) * span_s
        if jobs[u] > 0.0:
            booked[u] = (user_lag[u] - booked[u]) / jobs[u]
    for i in range(n):
        lag[i] += booked[user[i]]


@njit(cache=True)
def pass_of_jobs(
    lag: FloatArray, rate: FloatArray, user: IntArray, users: int, least_rate: float, pull: float
) -> FloatArray:
    """The pass each job goes by: its own, lag / rate, plus `pull` times that of its user.

    With the user's part a user whose many jobs all came late in the order is served next, and the cluster as
    a whole evens out what single nodes cannot. For users of one job it changes no order. Jobs without a due
    come after all others.
    """
    total, due = np.zeros(users), np.zeros(users)
    for i in range(len(lag)):
        total[user[i]] += lag[i]
        due[user[i]] += rate[i]
    out = np.empty(len(lag))
    for i in range(len(lag)):
        if rate[i] <= least_rate:
            out[i] = 1e15 + lag[i]
            continue
        out[i] = lag[i] / rate[i]
        if pull > 0.0:
            out[i] += pull * total[user[i]] / due[user[i]]
    return out


@njit(cache=True)
def settle(gpus: FloatArray, part: FloatArray, span_s: float, beyond: FloatArray) -> None:
    """Add what users had of each type beyond their part of what was given out, in `span_s` seconds.

    Of what was given out: GPUs that fell idle, as gangs did not fit, are owed by nobody.
    """
    users, types = part.shape
    for t in range(types):
        given = gpus[:, t].sum() / max(part[:, t].sum(), 1e-12)
        for u in range(users):
            if part[u, t] > 0.0:
                beyond[u, t] += (gpus[u, t] - part[u, t] * given) * span_s


@njit(cache=True)
def factors(beyond: FloatArray, part: FloatArray, over_s: float) -> FloatArray:
    """1 - beyond / (part * over_s), within 0.1 .. 10; 1 for who has no part."""
    out = np.ones_like(part)
    for u in range(part.shape[0]):
        for t in range(part.shape[1]):
            if part[u, t] > 0.0:
                out[u, t] = min(max(1.0 - beyond[u, t] / (part[u, t] * over_s), 0.1), 10.0)
    return out


@njit(cache=True)
def bound_credit(owed: FloatArray, rate: FloatArray, credit_s: float) -> None:
    """Nobody is owed, or owes, more than `credit_s` seconds of its rate; who has none keeps what it has."""
    flat, rates = owed.ravel(), rate.ravel()
    for i in range(len(flat)):
        if rates[i] > 0.0:
            flat[i] = min(max(flat[i], -credit_s * rates[i]), credit_s * rates[i])


@njit(cache=True)
def sum_up(
    lag: FloatArray, gpus: IntArray, gpu_type: IntArray, rate: FloatArray, user: IntArray,
    user_lag: FloatArray, user_rate: FloatArray, user_gpus: FloatArray,
) -> None:  # fmt: skip
    """Lags, dues and GPUs by user; who has no job keeps its lag."""
    total, present = np.zeros_like(user_lag), np.zeros(len(user_lag), np.bool_)
    user_rate[:] = 0.0
    user_gpus[:] = 0.0
    for i in range(len(user)):
        u = user[i]
        present[u] = True
        total[u] += lag[i]
        user_rate[u] += rate[i]
        user_gpus[u, max(gpu_type[i], 0)] += gpus[i]
    for u in range(len(user_lag)):
        if present[u]:
            user_lag[u] = total[u]


class Accounts:
    """What users had and were due since the last booking, and what that came to, in GPU-seconds.

    `lag[user]` is what a user's jobs had beyond their dues on their nodes. `beyond[user, type]` is what the
    user had of a type beyond its part of it, whatever its jobs were due where they are: it tells of nodes
    with uneven loads.
    """

    def __init__(self, types: int) -> None:
        self.names: tuple[str, ...] = ()
        self.types = types
        self.since_s = 0.0
        self._users: tuple[User, ...] = ()
        self.tickets: FloatArray = np.zeros(0)
        self.lag: FloatArray = np.zeros(0)
        self.rate: FloatArray = np.zeros(0)
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

    def book(self, lag: FloatArray, gpus: IntArray, rate: FloatArray, user: IntArray, now_s: float) -> None:
        """Charge jobs and users for the time since the last booking."""
        span_s = max(now_s - self.since_s, 0.0)
        charge(lag, gpus, rate, user, span_s, self.lag, self.gpus, self.rate)
        self.book_users(now_s)

    def book_users(self, now_s: float) -> None:
        """Charge users only, for the time since the last booking."""
        settle(self.gpus, self.part, max(now_s - self.since_s, 0.0), self.beyond)
        self.since_s = now_s

    def corrections(self, over_s: float) -> FloatArray:
        """[user, type]: what to multiply parts with, so that who has had too little gets it back.

        1 - beyond / (part * over_s): a user a tenth of `over_s` behind is given a tenth more. A steady
        disadvantage, as of jobs on nodes that carry too much, so settles at a small debt instead of growing.
        """
        return np.asarray(factors(self.beyond, self.part, over_s))

    def go_on(
        self,
        lag: FloatArray,
        gpus: IntArray,
        gpu_type: IntArray,
        rate: FloatArray,
        user: IntArray,
        part: FloatArray,
        credit_s: float,
    ) -> None:
        """From now on users have these GPUs, dues and parts. Nobody is owed, or owes, more than `credit_s`
        seconds of its part; who has no job keeps what it has."""
        bound_credit(self.lag, self.rate, credit_s)
        bound_credit(self.beyond, self.part, credit_s)
        self.part = np.array(part, np.float64)
        sum_up(lag, gpus, gpu_type, rate, user, self.lag, self.rate, self.gpus)

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


_COLUMNS = ("lag", "rate", "gpus", "part", "beyond")
