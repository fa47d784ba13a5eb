"""Accounts of the users: GPU time of each type that a user received beyond its share, over all nodes."""

from __future__ import annotations

from typing import Any

import numpy as np

from shoal.core.arrays import FloatArray, IntArray
from shoal.core.cluster import User


def settle(gpus: FloatArray, part: FloatArray, span_s: float, beyond: FloatArray) -> None:
    """Add the GPU time that users received in `span_s` seconds beyond their share of the GPU time in use.

    Arrays are [user, type]. Shares are computed over GPUs in use. GPUs that stayed idle because no gang fitted count
    for no user.
    """
    in_use = gpus.sum(axis=0) / np.maximum(part.sum(axis=0), 1e-12)
    beyond += np.where(part > 0, gpus - part * in_use, 0.0) * span_s


def limit_accounts(beyond: FloatArray, part: FloatArray, credit_s: float, least: float) -> None:
    """Limit each account to `credit_s` seconds of the user's share, or `least` GPU-seconds if that is more.

    Accounts of users with a share sum to zero. What users that left owe, or are owed, is divided over the others in
    proportion to shares, so a new user starts at the mean. Users without a share keep their account.
    """
    limit = np.maximum(credit_s * part, least)
    limited = np.where(part > 0, np.clip(beyond, -limit, limit), 0.0)
    mean = limited.sum(axis=0) / np.maximum(part.sum(axis=0), 1e-12)
    beyond[:] = np.where(part > 0, limited - part * mean, beyond)


class Accounts:
    """What users have, and their shares, since the last settlement; and the accounts that result.

    `beyond[user, type]` is the GPU time, in GPU-seconds, that the user received of a type beyond its share of the GPU
    time in use, on all nodes together.
    """

    def __init__(self, types: int) -> None:
        self.names: tuple[str, ...] = ()
        #: Time of the last settlement. None before the first: earlier GPU time does not count.
        self.since_s: float | None = None
        self._users: tuple[User, ...] = ()
        self.tickets: FloatArray = np.zeros(0)
        self.gpus: FloatArray = np.zeros((0, types))
        self.part: FloatArray = np.zeros((0, types))
        self.beyond: FloatArray = np.zeros((0, types))

    def set_users(self, users: tuple[User, ...]) -> None:
        """Update the list of users. New users start with an account of zero."""
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

    def settle(self, now_s: float) -> float:
        """Charge users for the time since the last settlement. Returns the length of that time in seconds."""
        span_s = 0.0 if self.since_s is None else max(now_s - self.since_s, 0.0)
        settle(self.gpus, self.part, span_s, self.beyond)
        self.since_s = now_s
        return span_s

    def passes(self) -> FloatArray:
        """[user, type]: the pass of each user relative to the mean, beyond / part in seconds; inf without a share."""
        some = self.part > 0
        return np.where(some, self.beyond / np.where(some, self.part, 1.0), np.inf)

    def corrections(self, over_s: float) -> FloatArray:
        """[user, type]: factors for the shares, so that users that received too little catch up.

        1 - pass / over_s: a user that is a tenth of `over_s` behind gets a tenth more. The factor stays between 0.1 and
        10, so that no user is shut out or takes all.
        """
        pass_s = np.where(self.part > 0, self.passes(), 0.0)
        return np.clip(1.0 - pass_s / over_s, 0.1, 10.0)

    def set_shares(self, part: FloatArray, credit_s: float, least: float = 0.0) -> None:
        """From now on users have these shares. See `limit_accounts` for the limits."""
        self.part = np.array(part, np.float64)
        limit_accounts(self.beyond, self.part, credit_s, least)

    def set_gpus(self, gpus: IntArray, gpu_type: IntArray, user: IntArray) -> None:
        """From now on jobs have these GPUs."""
        users, types = self.part.shape
        cell = user * types + np.maximum(gpu_type, 0)
        flat = np.bincount(cell, weights=gpus, minlength=users * types)
        self.gpus = flat.reshape(users, types).astype(np.float64)

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
