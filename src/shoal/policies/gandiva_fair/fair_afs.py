"""Fair between users and efficient within: the shares of gandiva-fair, divided among jobs by AFS."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal.core.arrays import BoolArray, FloatArray, IntArray
from shoal.core.decision import Decision
from shoal.core.errors import ShoalError
from shoal.core.options import at_least_a_second
from shoal.core.reason import Code
from shoal.core.supply import Supply
from shoal.core.view import View
from shoal.core.words import spoken
from shoal.policies.afs.afs_l import hand_out_by_length
from shoal.policies.afs.afs_p import hand_out_by_gain
from shoal.policies.base import Policy
from shoal.policies.gandiva_fair import homes, pools
from shoal.policies.gandiva_fair.accounts import Accounts
from shoal.policies.gandiva_fair.dues import NO_DUE, demand_of_users, dues
from shoal.policies.gandiva_fair.market import Market
from shoal.policies.gandiva_fair.tables import Claims, TypeTargets

_INSIDE = ("afs-p", "afs-l")


@dataclass(frozen=True)
class FairAfsOptions:
    #: How the jobs of one user are sized: afs-p needs no job lengths, afs-l does.
    inside: str = "afs-p"
    #: The part of the dues of elastic jobs that AFS gives to the jobs of any user that gain most. 0 keeps the users'
    #: shares at all times; more shortens the average completion. `correct_s` gives back what users then lack.
    slack: float = 0.0
    #: How long a rigid gang runs before others may take its GPUs, and how often fractions of GPUs are evened out.
    quantum_s: float = 1800.0
    #: How long an elastic job keeps its share while the user has more jobs than GPUs (afs-p).
    turn_s: float = 7200.0
    #: Whether users trade GPUs of different types.
    trading: bool = True
    #: A user that is behind or ahead of its share is corrected over about this time.
    correct_s: float = 7200.0
    #: The most that a user can be owed, or can owe, in seconds of its share. The rest is forgotten.
    credit_s: float = 14400.0
    #: Moves between GPU types: interval, moves per interval, and how long a moved job is left alone.
    balance_s: float = 1800.0
    migrations: int = 8
    rest_s: float = 3600.0
    #: Rounds of trades that are kept for the report.
    keep_rounds: int = 1000

    def __post_init__(self) -> None:
        if self.inside not in _INSIDE:
            raise ShoalError(f"option inside={self.inside!r} of policy 'fair-afs' must be afs-p or afs-l")
        at_least_a_second("quantum_s", self.quantum_s, "fair-afs")
        at_least_a_second("turn_s", self.turn_s, "fair-afs")
        for name in ("correct_s", "credit_s", "balance_s"):
            if not getattr(self, name) > 0:
                raise ShoalError(f"option {name} of policy 'fair-afs' must be above 0")
        if not 0 <= self.slack <= 1:
            raise ShoalError("option slack of policy 'fair-afs' must be from 0 to 1")


class FairAfs(Policy):
    """Users get GPUs by tickets, as under gandiva-fair. A user's jobs get them by AFS.

    A user's share of each GPU type follows from tickets, demand and trading. It is divided equally among the user's
    jobs. Elastic jobs put theirs together in a pool; rigid jobs are gangs. Gangs and pools are sorted by pass (see
    `pools`). Inside a pool, AFS balances short jobs against efficient jobs. GPUs that no user is due are lent by AFS
    over all users, so no usable GPU is idle. Users that are ahead or behind get a smaller or larger share for a
    while.

    State of each job: the number of its GPU type, plus 1. Of a gang: its lag in GPU-seconds and the GPUs that it is
    due. Of a job in a pool: when its turn ends and how many turns it has had.
    """

    name = "fair-afs"
    uses_speeds = True
    columns = ("type_plus_1", "lag_gpu_s", "due_gpus", "turn_end_s", "turns_had")
    summary = "fair shares by tickets between users, AFS within each user's part"
    uses_tickets = uses_weights = True
    Options = FairAfsOptions

    @property
    def uses_lengths(self) -> bool:
        return bool(self.options.inside == "afs-l")

    @property
    def quantum(self) -> str:
        o = self.options
        turns = "" if self.uses_lengths else f"; the jobs of a user take turns of {spoken(o.turn_s)}"
        return f"a job of a fixed size keeps its GPUs for a quantum of {spoken(o.quantum_s)}{turns}"

    def __init__(self, options: Any = None, *, rng: np.random.Generator | None = None) -> None:
        super().__init__(options, rng=rng)
        self.accounts = Accounts(0)
        self.market = Market(trading=self.options.trading, keep_rounds=self.options.keep_rounds)
        #: [user, type]: lag of each pool, what it is due and what it has been granted.
        self.pool_lag: FloatArray = np.zeros((0, 0))
        self.pool_rate: FloatArray = np.zeros((0, 0))
        self.pool_gpus: FloatArray = np.zeros((0, 0))
        self.moved_s: dict[int, float] = {}
        self.quantum_end_s = -np.inf
        self.balance_at_s = 0.0
        self._has_moves = False  # a job shall move to another type, and must not yet
        self._gpu_types: tuple[str, ...] = ()

    # -- the decision ------------------------------------------------------------------------------

    def decide(self, view: View, supply: Supply, now_s: float) -> Decision:
        # 1. Settle the accounts of users and gangs up to now.
        rigid = view.min_gpus >= view.max_gpus
        self._book(view, supply, rigid, now_s)
        if not len(view):
            self.market.close(len(supply.cluster.users), len(view.gpu_types))
            self._go_on(view, view.gpus, view.gpu_type)
            return Decision(np.zeros(0, np.int32), np.zeros(0, np.int32))
        new_quantum = bool(now_s >= self.quantum_end_s - 1e-9)
        if new_quantum:
            self.quantum_end_s = (
                np.floor(now_s / self.options.quantum_s + 1e-9) + 1
            ) * self.options.quantum_s
        # 2. Compute the users' shares of each type, after trading.
        cap = np.where(rigid, view.requested_gpus, view.max_gpus).astype(np.int32)
        speed = homes.speeds_by_type(
            view.speeds,
            view.speed_at,
            view.type_max,
            np.where(rigid, cap, view.min_gpus),
            supply.gpus_of_type,
        )
        users = supply.cluster.users
        demand, may_use, own = homes.demand_by_user(speed, view.user, cap, len(users))
        self.market.update(self.accounts.tickets, demand, may_use, own, supply.gpus_of_type, now_s)
        # 3. Bind jobs to types, and compute what each is due.
        types = self._bind(view, speed, cap, demand, new_quantum, now_s)
        weights = self.market.weights * self.accounts.corrections(self.options.correct_s)
        rate = dues(Claims(view.user, types, cap, view.weight, types >= 0), weights, supply.gpus_of_type)
        view.column("due_gpus")[rigid] = rate[rigid]
        # 4. Divide whole GPUs between gangs and pools, and inside the pools by AFS.
        shares = self._share(view, supply, rigid, types, rate, cap, new_quantum, now_s)
        self._take_idle(view, supply, rigid, types, speed, cap, shares, now_s)
        self._go_on(view, shares, types)
        codes = np.where(types >= 0, 0, int(Code.INFEASIBLE)).astype(np.int8)
        wake_s = self._wake_s(view, supply, shares, rigid, types, now_s)
        chosen = np.where(shares > 0, types, -1).astype(np.int32)
        return Decision(shares, chosen, wake_s=wake_s, codes=codes)

    def _book(self, view: View, supply: Supply, rigid: BoolArray, now_s: float) -> None:
        if self._gpu_types != view.gpu_types:
            self._gpu_types, self.accounts = view.gpu_types, Accounts(len(view.gpu_types))
        self.accounts.set_users(supply.cluster.users)
        span_s = self.accounts.settle(now_s)
        view.column("lag_gpu_s")[rigid] += (view.gpus[rigid] - view.column("due_gpus")[rigid]) * span_s
        more = len(self.accounts.names) - len(self.pool_lag)
        if more or self.pool_lag.shape[1] != len(view.gpu_types):
            for column in ("pool_lag", "pool_rate", "pool_gpus"):
                old = getattr(self, column).reshape(-1, len(view.gpu_types))
                setattr(self, column, np.concatenate([old, np.zeros((more, len(view.gpu_types)))]))
        self.pool_lag += (self.pool_gpus - self.pool_rate) * span_s
        # A pool is owed, or owes, one GPU for a quantum at most. The accounts keep the rest.
        np.clip(self.pool_lag, -self.options.quantum_s, self.options.quantum_s, out=self.pool_lag)

    def _go_on(self, view: View, gpus: IntArray, types: IntArray) -> None:
        self.accounts.set_shares(self.market.weights, self.options.credit_s)
        self.accounts.set_gpus(gpus, types, view.user)

    def _bind(
        self,
        view: View,
        speed: FloatArray,
        cap: IntArray,
        demand: FloatArray,
        new_quantum: bool,
        now_s: float,
    ) -> IntArray:
        """The GPU type of each row, -1 where it cannot run. Some jobs move to a type where their user has too few."""
        types = (view.column("type_plus_1") - 1).astype(np.int32)
        rows = np.arange(len(view))
        self._has_moves = False
        types[(types >= 0) & (speed[np.maximum(types, 0), rows] <= 0)] = -1
        if len(speed) == 1:
            types = np.where(speed[0] > 0, 0, -1).astype(np.int32)
        else:
            runs = np.asarray(speed.max(axis=0) > 0)
            claims = Claims(view.user, types, cap, view.weight, runs)
            want = TypeTargets(
                view.user,
                cap,
                speed,
                homes.targets(self.market.weights, demand),
                demand_of_users(claims, *self.market.weights.shape),
            )
            if new_quantum and now_s >= self.balance_at_s:
                self.balance_at_s = now_s + self.options.balance_s
                rested = np.array(
                    [
                        now_s - self.moved_s.get(j, -np.inf) >= self.options.rest_s
                        for j in view.job_ids.tolist()
                    ]
                )
                for row, t in homes.retype(rows[::-1].copy(), types, rested, self.options.migrations, want):
                    types[row] = t
                    self.moved_s[int(view.job_ids[row])] = now_s
            fresh = np.flatnonzero(runs & (types < 0))
            types[fresh] = homes.choose_types(fresh, want)
            everyone = np.ones(len(view), np.bool_)
            self._has_moves = bool(homes.retype(rows, types, everyone, 1, want))
        view.column("type_plus_1")[:] = types + 1.0
        return types

    def _share(
        self,
        view: View,
        supply: Supply,
        rigid: BoolArray,
        types: IntArray,
        rate: FloatArray,
        cap: IntArray,
        new_quantum: bool,
        now_s: float,
    ) -> IntArray:
        by_length = self.options.inside == "afs-l"
        remaining = view.remaining_now(now_s) if by_length else view.remaining
        if by_length and np.isnan(remaining[~rigid]).any():
            raise ShoalError(
                "inside=afs-l must know all lengths; give every job its iterations, or use afs-p"
            )
        turn_over = ~rigid & (view.gpus > 0) & (view.column("turn_end_s") <= now_s)
        view.column("turns_had")[turn_over] += 1.0
        kept = ~rigid & (view.gpus >= view.min_gpus) & (view.gpus <= cap) & ~turn_over
        passed = np.where(rigid, view.column("lag_gpu_s") / np.maximum(rate, NO_DUE), 0.0)
        least = np.where(rigid, view.requested_gpus, view.min_gpus).astype(np.int32)
        shares = np.zeros(len(view), np.int32)
        claims = Claims(view.user, types, cap, view.weight, types >= 0)
        for t, gpus in enumerate(supply.gpus_of_type.tolist()):
            here = types == t
            pool, limit, due, pool_most = pools.form_pools(
                t, claims, rigid, rate, view.type_max[t], len(self.accounts.names)
            )
            due *= 1.0 - self.options.slack
            granted = pools.grant(
                np.flatnonzero(here & rigid),
                passed,
                view.requested_gpus,
                (view.gpus > 0) & here & (not new_quantum),
                pools.Pools(due, np.ascontiguousarray(self.pool_lag[:, t]), pool_most),
                self.options.quantum_s,
                gpus,
                shares,
            )
            self.pool_rate[:, t], self.pool_gpus[:, t] = due, granted
            at = view.speed_at[t]
            sizes = pools.Sizes(view.speeds, at, view.min_gpus, limit)
            if by_length:
                pools.share_pools_by_length(pool, granted, remaining, sizes, shares)
            else:
                in_turn = kept & (view.gpu_type == t)
                turns = pools.Turns(view.gpus, in_turn, view.column("turns_had"), view.first_start_s)
                pools.share_pools_by_gain(pool, granted, turns, sizes, shares)
            left = gpus - int(shares[here].sum())
            if left > 0:
                left = pools.lend_to_waiting(np.argsort(passed, kind="stable"), here, left, least, shares)
            if left > 0:  # the rest goes by AFS to the jobs of all users
                most = np.where(here & ~rigid, limit, 0).astype(np.int32)
                if by_length:
                    hand_out_by_length(shares, remaining, view.speeds, at, view.min_gpus, most, left)
                else:
                    rows = np.flatnonzero((shares > 0) & (shares < most)).astype(np.int32)
                    if len(rows):
                        hand_out_by_gain(shares, rows, view.speeds, at, most, left)
        begins = ~rigid & (shares > 0) & ~(kept & (shares == view.gpus))
        view.column("turn_end_s")[begins] = now_s + self.options.turn_s
        return shares

    def _take_idle(
        self,
        view: View,
        supply: Supply,
        rigid: BoolArray,
        types: IntArray,
        speed: FloatArray,
        cap: IntArray,
        shares: IntArray,
        now_s: float,
    ) -> None:
        """Jobs that wait for GPUs of their type take idle ones of the type on which they are fastest."""
        waiting = np.flatnonzero((shares == 0) & (types >= 0))
        free = supply.gpus_of_type - np.bincount(
            np.maximum(types, 0), weights=shares, minlength=len(supply.gpus_of_type)
        ).astype(np.int32)
        if not len(waiting) or not free.any():
            return
        least = np.where(rigid, view.requested_gpus, view.min_gpus)
        for row in waiting.tolist():
            fits = (speed[:, row] > 0) & (least[row] <= free)
            if not fits.any():
                continue
            t = int(np.argmax(np.where(fits, speed[:, row], 0.0)))
            top = cap[row] if rigid[row] else min(cap[row], view.type_max[t, row])
            shares[row] = min(top, free[t])
            free[t] -= shares[row]
            types[row] = t
            view.column("type_plus_1")[row] = t + 1.0
            if not rigid[row]:
                view.column("turn_end_s")[row] = now_s + self.options.turn_s

    def _wake_s(
        self, view: View, supply: Supply, shares: IntArray, rigid: BoolArray, types: IntArray, now_s: float
    ) -> float:
        """The end of the quantum while gangs wait, pools are due fractions or jobs shall move; or the end of a turn."""
        waiting = (shares == 0) & (types >= 0)
        uneven = np.abs(self.pool_gpus - self.pool_rate) > 1e-6
        wake_s = np.inf
        if (waiting & rigid).any() or (waiting.any() and uneven.any()) or self._contended(shares, view):
            wake_s = float(self.quantum_end_s)
        elif self._has_moves and int(shares.sum()) < supply.total_gpus:
            wake_s = float(max(self.quantum_end_s, self.balance_at_s))
        running = ~rigid & (shares > 0)
        if (waiting & ~rigid).any() and running.any():
            wake_s = min(wake_s, float(view.column("turn_end_s")[running].min()))
        return max(wake_s, now_s)

    def _contended(self, shares: IntArray, view: View) -> bool:
        """Whether a user has more or less than its share now, so that fractions of GPUs must rotate."""
        had = np.bincount(view.user, weights=shares, minlength=len(self.accounts.names))
        part = self.market.weights.sum(axis=1)
        return bool((np.abs(had - part) > 1e-6).any())

    # -- questions and saved state -----------------------------------------------------------------

    def left(self, job_id: int, now_s: float) -> None:
        self.moved_s.pop(job_id, None)

    def evidence(self, view: View, row: int, now_s: float) -> dict[str, float | int | str]:
        u = int(view.user[row])
        if len(self.market.entitled) <= u:
            return {}
        return {
            "user_entitled_gpus": float(self.market.entitled[u].sum()),
            "user_gpus": int(view.gpus[view.user == u].sum()),
        }

    def entitled(self) -> FloatArray:
        """[user, type]: GPUs by tickets, before trading."""
        return self.market.entitled

    def traded(self) -> FloatArray:
        """[user, type]: GPUs gained (below 0: given away) by trading."""
        return self.market.weights - self.market.entitled

    def report(self) -> dict[str, Any]:
        """The trades."""
        return {"trades": self.market.report(self.accounts.names, self._gpu_types)}

    def state(self) -> dict[str, Any]:
        return {
            **super().state(),
            "gpu_types": list(self._gpu_types),
            "accounts": self.accounts.state(),
            "market": self.market.state(),
            "pools": [self.pool_lag.tolist(), self.pool_rate.tolist(), self.pool_gpus.tolist()],
            "moved_s": {str(j): at for j, at in self.moved_s.items()},
            "quantum_end_s": float(self.quantum_end_s) if np.isfinite(self.quantum_end_s) else None,
            "balance_at_s": self.balance_at_s,
        }

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self._gpu_types = tuple(state["gpu_types"])
        self.accounts = Accounts(len(self._gpu_types))
        self.accounts.restore(state["accounts"])
        self.market.restore(state["market"])
        shape = (len(self.accounts.names), len(self._gpu_types))
        self.pool_lag, self.pool_rate, self.pool_gpus = (np.array(p).reshape(shape) for p in state["pools"])
        self.moved_s = {int(j): at for j, at in state["moved_s"].items()}
        self.quantum_end_s = -np.inf if state["quantum_end_s"] is None else state["quantum_end_s"]
        self.balance_at_s = state["balance_at_s"]
