"""The fairness ledger: what each user was entitled to, received, lent, borrowed and traded, by GPU type.

All numbers are GPU-seconds. At any time a user is entitled to its weighted water-filling share of each type among the
active users, capped by what its jobs can use. What it receives of a type beyond that, after trading, is borrowed. What
it does not use while others use it is lent. The ledger is settled lazily: rates are constant between two changes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.core.compiled import kernel
from shoal.core.view import View
from shoal.core.water_filling import water_fill_into

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int32]

#: Columns of the account.
ENTITLED, RECEIVED, LENT, BORROWED, TRADED = range(5)
COLUMNS = ("entitled", "received", "lent", "borrowed", "traded")


@kernel
def entitlement(
    tickets: FloatArray,
    demand: FloatArray,
    may_use: FloatArray,
    gpus_of_type: FloatArray,
    fast_first: IntArray,
) -> FloatArray:
    """[user, type]: the GPUs of each type that a user is entitled to, by tickets and capped by its demand.

    Water-filling type by type, fast types first, among the users with demand left. No user gets more than its jobs may
    use of the type (`may_use[user, type]`). With one type this is plain water-filling.
    """
    users, types = may_use.shape
    due = np.zeros((users, types))
    left, cap, share = demand.copy(), np.empty(users), np.empty(users)
    for t in fast_first:
        for u in range(users):
            cap[u] = min(left[u], may_use[u, t])
        water_fill_into(tickets, cap, gpus_of_type[t], share)
        for u in range(users):
            due[u, t] = share[u]
            left[u] = max(left[u] - share[u], 0.0)
    return due


@kernel
def demand_and_use(
    user: IntArray,
    want: IntArray,
    gpus: IntArray,
    gpu_type: IntArray,
    type_max: IntArray,
    users: int,
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """(demand[user], may_use[user, type], received[user, type]) of the jobs in the view."""
    types = type_max.shape[0]
    demand, may_use, received = np.zeros(users), np.zeros((users, types)), np.zeros((users, types))
    for i in range(len(user)):
        u = user[i]
        if gpus[i] > 0:
            received[u, max(gpu_type[i], 0)] += gpus[i]
        wish = 0
        for t in range(types):
            could = min(want[i], type_max[t, i])
            may_use[u, t] += could
            wish = max(wish, could)
        demand[u] += wish
    return demand, may_use, received


@kernel
def fill_rates(rate: FloatArray, entitled: FloatArray, received: FloatArray, traded: FloatArray) -> None:
    """Write all columns of `rate[user, type]`. Unused entitlement counts as lent as far as others use it."""
    users, types = entitled.shape
    for t in range(types):
        borrowed = unused = 0.0
        for u in range(users):
            beyond = received[u, t] - entitled[u, t] - traded[u, t]
            rate[u, t, ENTITLED], rate[u, t, RECEIVED] = entitled[u, t], received[u, t]
            rate[u, t, TRADED] = traded[u, t]
            rate[u, t, BORROWED], rate[u, t, LENT] = max(beyond, 0.0), max(-beyond, 0.0)
            borrowed += rate[u, t, BORROWED]
            unused += rate[u, t, LENT]
        if unused > borrowed:
            for u in range(users):
                rate[u, t, LENT] *= borrowed / unused


class Ledger:
    """Accounts of all users over time. Call `observe` after every change of shares, jobs, tickets or GPUs."""

    def __init__(
        self,
        users: tuple[str, ...],
        gpu_types: tuple[str, ...],
        *,
        start_s: float = 0.0,
        sample_s: float = 3600.0,
    ) -> None:
        self.users = users
        self.gpu_types = gpu_types
        self.now_s = start_s
        #: Interval of the samples for plots. It doubles when there are too many samples.
        self.sample_s = sample_s
        #: [user, type, column] GPU-seconds up to `now_s`.
        self.account: FloatArray = np.zeros((len(users), len(gpu_types), len(COLUMNS)))
        #: Current GPUs, in the same layout, constant until the next change.
        self.rate: FloatArray = np.zeros_like(self.account)
        self._fast_first: IntArray = np.arange(len(gpu_types), dtype=np.int32)
        self._times: list[float] = [start_s]
        self._samples: list[FloatArray] = [self.account.copy()]

    def observe(
        self,
        view: View,
        tickets: FloatArray,
        gpus_of_type: IntArray,
        now_s: float,
        *,
        want_gpus: IntArray | None = None,
        traded: FloatArray | None = None,
        entitled: FloatArray | None = None,
    ) -> None:
        """Settle the accounts up to `now_s`, then read the current rates from the view.

        `want_gpus` are the GPUs that each job would use alone (default: the requested size). `traded[user, type]` are
        the GPUs gained or given away by trading. `entitled` overrides the entitlements, for policies that compute them.
        """
        users = len(tickets)
        self.settle(now_s)
        if users > len(self.users):
            raise ValueError(f"{users} users, but the ledger has {len(self.users)}; add them with `join`")
        want = view.requested_gpus if want_gpus is None else want_gpus
        demand, may_use = np.zeros(users), np.zeros((users, len(gpus_of_type)))
        received = np.zeros_like(may_use)
        if len(view):  # empty arrays have another layout, for which the kernel would be compiled again
            demand, may_use, received = demand_and_use(
                view.user, want, view.gpus, view.gpu_type, view.type_max, users
            )
        if entitled is None:
            entitled = entitlement(
                tickets, demand, may_use, gpus_of_type.astype(np.float64), self._fast_first
            )
        self.set_rates(entitled, received, traded)

    def set_rates(self, entitled: FloatArray, received: FloatArray, traded: FloatArray | None = None) -> None:
        """From now on users are entitled to, and receive, these GPUs of each type."""
        nothing = np.zeros_like(entitled)
        fill_rates(self.rate, entitled, received, nothing if traded is None else traded)

    def order_types(self, fast_first: IntArray) -> None:
        """Set the order of types in which users with limited demand take their entitlement."""
        self._fast_first = np.asarray(fast_first, np.int32)

    def join(self, user: str) -> None:
        """Add a user."""
        self.users = (*self.users, user)
        more = np.zeros((1, *self.account.shape[1:]))
        self.account = np.concatenate([self.account, more])
        self.rate = np.concatenate([self.rate, more])

    def settle(self, now_s: float) -> None:
        """Bring the accounts up to `now_s`, and take samples."""
        if now_s <= self.now_s:
            return
        while self._times[-1] + self.sample_s <= now_s:
            at = self._times[-1] + self.sample_s
            self._times.append(at)
            self._samples.append(self.account + self.rate * (at - self.now_s))
            if len(self._times) > 2048:
                self._times, self._samples = self._times[::2], self._samples[::2]
                self.sample_s *= 2
        self.account += self.rate * (now_s - self.now_s)
        self.now_s = now_s

    def deviation(self) -> FloatArray:
        """Per user, (received - due) / due over all types and time, where due = entitled + traded.

        nan for users that were due nothing.
        """
        total = self.account.sum(axis=1)
        due = total[:, ENTITLED] + total[:, TRADED]
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.where(due > 0, (total[:, RECEIVED] - due) / np.where(due > 0, due, 1), np.nan)

    def totals(self) -> dict[str, Any]:
        """GPU-seconds so far per user and type, as plain data."""
        deviation = self.deviation()
        return {
            user: {
                **{
                    gpu_type: {name: float(self.account[u, t, c]) for c, name in enumerate(COLUMNS)}
                    for t, gpu_type in enumerate(self.gpu_types)
                },
                "deviation": None if np.isnan(deviation[u]) else float(deviation[u]),
            }
            for u, user in enumerate(self.users)
        }

    def over_time(self) -> dict[str, Any]:
        """Mean GPUs in each sample interval, per user and column over all types, for plots."""
        times = np.array(self._times)
        n = len(self.users)
        table = np.zeros((len(times), n, len(COLUMNS)))
        for k, sample in enumerate(self._samples):
            table[k, : len(sample)] = sample.sum(axis=1)
        widths = np.diff(times)
        means = np.diff(table, axis=0) / np.where(widths > 0, widths, 1)[:, None, None]
        return {
            "time_s": times[1:].tolist(),
            "gpus": {
                user: {name: means[:, u, c].tolist() for c, name in enumerate(COLUMNS)}
                for u, user in enumerate(self.users)
            },
        }

    def worst_deviation(self, *, window_s: float = 0.0) -> float:
        """Largest shortfall or excess of a user in any window: |received - due| / due GPU time.

        A window does not count if a user was due less than a tenth of its mean: one job then makes a large difference.
        `window_s` = 0 means the whole time as one window.
        """
        if window_s <= 0:
            deviation = self.deviation()
            return float(np.nanmax(np.abs(deviation))) if np.isfinite(deviation).any() else 0.0
        step = max(round(window_s / self.sample_s), 1)
        n = len(self.users)
        table = np.zeros((len(self._samples), n, 2))
        for k, sample in enumerate(self._samples):
            total = sample.sum(axis=1)
            table[k, : len(sample), 0] = total[:, ENTITLED] + total[:, TRADED]
            table[k, : len(sample), 1] = total[:, RECEIVED]
        windows = np.diff(table[::step], axis=0)
        if not len(windows):
            return self.worst_deviation()
        due = windows[:, :, 0]
        usual = due.sum(axis=0) / np.maximum((due > 0).sum(axis=0), 1)
        counts = due > 0.1 * usual
        off = np.abs(windows[:, :, 1] - due) / np.where(due > 0, due, 1)
        return float(off[counts].max()) if counts.any() else 0.0

    def state(self) -> dict[str, Any]:
        """The ledger as plain data."""
        return {
            "users": list(self.users),
            "now_s": self.now_s,
            "sample_s": self.sample_s,
            "account": self.account.tolist(),
            "rate": self.rate.tolist(),
            "times": list(self._times),
            "samples": [s.tolist() for s in self._samples],
        }

    @classmethod
    def restored(cls, state: dict[str, Any], gpu_types: tuple[str, ...]) -> Ledger:
        ledger = cls(tuple(state["users"]), gpu_types, start_s=state["now_s"], sample_s=state["sample_s"])
        # Without users a saved account is an empty list without its other dimensions.
        ledger.account = np.array(state["account"], float).reshape(ledger.account.shape)
        ledger.rate = np.array(state["rate"], float).reshape(ledger.rate.shape)
        ledger._times = list(state["times"])
        ledger._samples = [np.array(s) for s in state["samples"]]
        return ledger
