"""Fair shares between users by time slicing: the whole of Gandiva_fair."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.core.arrays import FloatArray, IntArray
from shoal.core.decision import Decision
from shoal.core.errors import ShoalError
from shoal.core.options import at_least_a_second
from shoal.core.plan import Placement
from shoal.core.reason import Code
from shoal.core.supply import Supply
from shoal.core.view import View
from shoal.policies.base import Policy
from shoal.policies.gandiva_fair import homes, kernels, relief
from shoal.policies.gandiva_fair.accounts import Accounts, pass_of_jobs, urgency
from shoal.policies.gandiva_fair.binding import Binding
from shoal.policies.gandiva_fair.kernels import NO_RATE, BoolArray
from shoal.policies.gandiva_fair.market import Market
from shoal.policies.gandiva_fair.measuring import Measuring
from shoal.policies.gandiva_fair.profiling import Rules
from shoal.policies.gandiva_fair.round import Nodes, Round

_PROFILING = ("given", "user", "job")
_TIES = ("oldest", "newest", "widest")


@dataclass(frozen=True)
class GandivaFairOptions:
    #: Time slice. 60 s is Gandiva's: long against the pause of a switch, short against a person's patience.
    quantum_s: float = 60.0
    #: Whether users trade GPUs of different types.
    trading: bool = True
    #: Where speeds come from: given with the job, or measured per user or per job by visits to each type.
    profiling: str = "given"
    #: How long a visit lasts at most, and how many there are at a time.
    visit_s: float = 600.0
    visits: int = 4
    #: What was measured longer ago than this is measured again.
    stale_s: float = 7 * 86400.0
    #: Load balancing: how often, how many migrations at most each time, the least gain in ticket load per
    #: GPU, and how long a migrated job rests: a migration of 10 s costs it less than 2 % of the time.
    balance_s: float = 600.0
    migrations: int = 8
    min_gain: float = 0.05
    rest_s: float = 600.0
    #: Who goes first of equals: oldest, newest or widest.
    tie_order: str = "oldest"
    #: How much a user's pass counts in the order of its jobs, next to the job's own among its siblings.
    pull: float = 20.0
    #: What a job had less or more than its siblings is forgotten over about this long; what users had is not.
    forget_s: float = 3600.0
    #: Parts of users that are behind or ahead are made larger or smaller, to get it back in about this long.
    correct_s: float = 3600.0
    #: What a user may be owed, and owe, at most, in quanta of its part; more is forgotten. Who is ahead on GPUs that
    #: others cannot use is not to owe it for long.
    credit_quanta: float = 60.0
    debt_quanta: float = 10.0
    #: On nodes, users this far behind their part, in quanta of all GPUs of the type, have jobs moved to where
    #: they can run; a quarter of it, and their nodes choose sets of jobs in their favour.
    relief_quanta: float = 0.2
    #: On nodes, a job that has waited this many turns (quanta until it is due one) goes first.
    patience_turns: float = 8.0
    #: Rounds of trades that are kept on record.
    keep_rounds: int = 1000

    def __post_init__(self) -> None:
        at_least_a_second("quantum_s", self.quantum_s, "gandiva-fair")
        for name in (
            "visit_s",
            "balance_s",
            "forget_s",
            "correct_s",
            "credit_quanta",
            "debt_quanta",
            "patience_turns",
        ):
            if not getattr(self, name) > 0:
                raise ShoalError(f"option {name} of policy 'gandiva-fair' must be above 0")
        for name in ("migrations", "visits", "min_gain", "rest_s", "pull", "relief_quanta"):
            if not getattr(self, name) >= 0:
                raise ShoalError(f"option {name} of policy 'gandiva-fair' must not be negative")
        for name, known in (("profiling", _PROFILING), ("tie_order", _TIES)):
            if getattr(self, name) not in known:
                raise ShoalError(
                    f"option {name}={getattr(self, name)!r} of policy 'gandiva-fair' must be one of "
                    f"{', '.join(known)}"
                )


class GandivaFair(Policy):
    """GPU time in proportion to tickets, on mixed GPUs, by split stride, migration and trading.

    A user's tickets entitle it to a part of every GPU type (water-filling over the users with jobs); trading
    changes the parts; a part is divided equally among the user's jobs on that type. That gives each job its
    due, the GPUs it should have on average. Jobs are bound to nodes. At the end of every quantum each node
    runs gang-aware stride over its jobs, and gangs that span nodes are ordered against the nodes' aggregates
    (Chaudhary et al., EuroSys'20). A pass is that of the user, for what it had on all nodes, and then that of
    the job among its user's. Between quanta only free GPUs are given out. A balancer keeps the due per GPU
    even over the nodes; idle GPUs take in waiting jobs from anywhere.

    State of each job: its lag in GPU-seconds, its home (node + 1; 0: none yet; -1: it spans nodes, see
    `Binding`) and the GPUs it is due.
    """

    name = "gandiva-fair"
    columns = ("lag_gpu_s", "home", "due_gpus")
    summary = "fair shares by tickets: split stride, migration, trading of mixed GPUs (EuroSys'20)"
    elastic = False
    Options = GandivaFairOptions

    def __init__(self, options: Any = None, *, rng: np.random.Generator | None = None) -> None:
        super().__init__(options, rng=rng)
        o = self.options
        self.accounts = Accounts(0)
        self.market = Market(trading=o.trading, keep_rounds=o.keep_rounds)
        self.measuring = Measuring(o.profiling, o.visit_s, o.visits, Rules(stale_s=o.stale_s))
        self.binding = Binding(
            balance_s=o.balance_s, migrations=o.migrations, min_gain=o.min_gain, rest_s=o.rest_s
        )
        self.quantum_end_s = -np.inf
        self._gpu_types: tuple[str, ...] = ()

    # -- the decision ------------------------------------------------------------------------------

    def decide(self, view: View, supply: Supply, now_s: float) -> Decision:
        """Read it top to bottom."""
        if self._gpu_types != view.gpu_types:
            self._gpu_types, self.accounts = view.gpu_types, Accounts(len(view.gpu_types))
        # 1. book what everybody had since the last decision
        self.accounts.know(supply.cluster.users)
        self._book(view, now_s)
        if not len(view):
            self.market.close(len(supply.cluster.users), len(view.gpu_types))
            self._go_on(view, view.gpus, view.gpu_type)
            return Decision(np.zeros(0, np.int32), np.zeros(0, np.int32))
        # 2. the users' parts of each type, after trading
        r = self._round(view, supply, now_s)
        # 3. bind jobs to types and nodes, and give each its due
        visits = self.measuring.send(view, r.types, r.speed, now_s) if r.new_quantum else {}
        corrections = self.accounts.corrections(self.options.correct_s)
        self.binding.bind(r, corrections, visits, lambda: self._order(view, self._passes(r)))
        # 4. who runs: all anew at the end of a quantum, else on what is free
        runs = self._run(r)
        self._go_on(view, np.where(runs, r.size, 0).astype(np.int32), r.types)
        return self._decision(r, runs)

    def _round(self, view: View, supply: Supply, now_s: float) -> Round:
        nodes = Nodes.of(supply)
        size, users = view.requested_gpus, len(supply.cluster.users)
        can_run = homes.speeds_by_type(view.speeds, view.speed_at, view.type_max, size, supply.gpus_of_type)
        demand, may_use, own = homes.demand_by_user(can_run, view.user, size, users)
        speed = self.measuring.speeds(view, can_run, now_s)
        if speed is not can_run:
            own = self.measuring.of_users(view, can_run, users)
        self.market.update(self.accounts.tickets, demand, may_use, own, supply.gpus_of_type, now_s)
        new_quantum = bool(now_s >= self.quantum_end_s - 1e-9)
        if new_quantum:
            quantum_s = self.options.quantum_s
            self.quantum_end_s = (np.floor(now_s / quantum_s + 1e-9) + 1) * quantum_s
        home, types, spans = self.binding.look_up(view, nodes)
        return Round(
            view,
            nodes,
            supply.gpus_of_type,
            now_s,
            new_quantum,
            speed,
            demand,
            self.market.weights,
            home,
            types,
            spans,
            self.options.quantum_s,
            -self.accounts.beyond / self.options.quantum_s,
            urgency(self.market.weights.sum(axis=1), demand),
            self.options.patience_turns,
        )

    def _book(self, view: View, now_s: float) -> None:
        span_s = self.accounts.book(now_s)
        view.column("lag_gpu_s")[:] *= np.exp(-span_s / self.options.forget_s)
        view.column("lag_gpu_s")[:] += (view.gpus - view.column("due_gpus")) * span_s

    def _go_on(self, view: View, gpus: IntArray, types: IntArray) -> None:
        o = self.options
        self.accounts.go_on(
            gpus,
            types,
            view.user,
            self.market.weights,
            float(o.credit_quanta * o.quantum_s),
            float(o.debt_quanta * o.quantum_s),
            2.0 * o.quantum_s * float(view.requested_gpus.max(initial=0)),
        )

    def _passes(self, r: Round) -> FloatArray:
        view, pull = r.view, float(self.options.pull)
        beyond = self.accounts.beyond
        if not r.nodes.pooled:  # in a pool all can be served; on nodes gangs may keep each other out
            beyond = np.where(beyond < 0, beyond * r.urgency[:, None], beyond)
        passed = pass_of_jobs(r.lag, r.rate, view.user, r.types, beyond, r.weights, NO_RATE, pull)
        if not r.nodes.pooled:
            relief.put_first(passed, r.waited_turns, self.options.patience_turns)
        if self.measuring.under_way:
            passed[self.measuring.rows_on_visit(view)] = -1e15
        return passed

    def _order(self, view: View, passed: FloatArray) -> NDArray[np.int64]:
        """Rows by pass, and in the tie order where equal but for rounding (a microsecond)."""
        order, passed = self.options.tie_order, passed.round(6)
        if order == "newest":
            return np.lexsort((-view.job_ids, passed))
        if order == "widest":
            return np.lexsort((view.job_ids, -view.requested_gpus, passed))
        return np.argsort(passed, kind="stable")

    def _run(self, r: Round) -> BoolArray:
        """Who runs from now on; jobs that idle GPUs take in from elsewhere are bound there."""
        view, bound = r.view, r.bound
        kernels.compare_siblings(r.lag, r.rate, view.user, r.types, *r.weights.shape)
        passed = self._passes(r)
        order = self._order(view, passed)
        keep = np.zeros(len(view), np.bool_) if r.new_quantum else (view.gpus == r.size) & bound
        due = bound & r.owned[view.user, np.maximum(r.types, 0)]
        due[self.measuring.rows_on_visit(view)] = True
        runs, free = self._stride(r, order, passed, due, keep)
        if r.new_quantum and not r.nodes.pooled:
            self._relieve(r, order, passed, due, runs, free)
            self.binding.steer(r, passed, runs, free)
        if not np.array_equal(due, bound):
            # Jobs whose user has no part of their type to speak of run on what others leave.
            self.binding.attract(r, order, runs, free, borrow=False)
            runs, free = self._stride(r, order, passed, bound, runs)
        self.binding.attract(r, order, runs, free, borrow=True)
        return runs

    def _stride(
        self, r: Round, order: NDArray[np.int64], passed: FloatArray, eligible: BoolArray, keep: BoolArray
    ) -> tuple[BoolArray, IntArray]:
        runs, free = kernels.split_stride(
            order,
            passed,
            np.maximum(r.rate, NO_RATE),
            r.size,
            r.home,
            r.spans.start,
            r.spans.node,
            r.spans.gpus,
            r.nodes.gpus,
            eligible,
            keep,
        )
        return runs, free

    def _behind(self, r: Round, quanta: float) -> BoolArray:
        """Rows of users who are this far behind their part of the type, in quanta of all of its GPUs."""
        users = self.accounts.beyond < -quanta * self.options.quantum_s * r.gpus_of_type
        return np.asarray(users[r.view.user, np.maximum(r.types, 0)])

    def _relieve(
        self,
        r: Round,
        order: NDArray[np.int64],
        passed: FloatArray,
        eligible: BoolArray,
        runs: BoolArray,
        free: IntArray,
    ) -> None:
        """Help users who have fallen behind: other sets on their nodes, and other nodes for their jobs."""
        starving = passed < relief.FIRST
        behind = starving | self._behind(r, 0.25 * self.options.relief_quanta)
        if not (behind & ~runs).any():
            return
        relief.choose_sets(
            order,
            passed,
            r.size,
            r.home,
            r.spans.start,
            r.spans.node,
            r.spans.gpus,
            r.nodes.gpus,
            eligible,
            behind,
            runs,
            free,
        )
        far = starving | self._behind(r, self.options.relief_quanta)
        self.binding.relieve(r, order, passed, eligible, far, runs, free)

    def _decision(self, r: Round, runs: BoolArray) -> Decision:
        gpus = np.where(runs, r.size, 0).astype(np.int32)
        codes = np.where(r.bound, 0, int(Code.INFEASIBLE)).astype(np.int8)
        placements: dict[int, Placement] | None = None
        if not r.nodes.pooled:
            changed = (gpus != r.view.gpus) & runs
            moved = np.array(list(r.moved), np.int64)
            changed[moved] = runs[moved]
            rows = np.flatnonzero(changed)
            placements = {
                row: ((node, n),) if node >= 0 else self.binding.spans[job]
                for row, node, n, job in zip(
                    rows.tolist(), r.home[rows].tolist(), gpus[rows].tolist(), r.view.job_ids[rows].tolist()
                )
            }
        waits = bool((r.bound & ~runs).any())
        return Decision(
            gpus,
            np.where(runs, r.types, -1).astype(np.int32),
            placements=placements,
            wake_s=float(self.quantum_end_s) if waits or self.measuring.under_way else np.inf,
            codes=codes,
            idle_because="the GPUs left are too few for any waiting gang" if waits else None,
        )

    # -- what people ask, and what must be remembered ----------------------------------------------

    def left(self, job_id: int, now_s: float) -> None:
        self.binding.left(job_id)
        self.measuring.left(job_id)

    def evidence(self, view: View, row: int, now_s: float) -> dict[str, float | int | str]:
        u = int(view.user[row])
        rate = float(view.column("due_gpus")[row])
        found: dict[str, float | int | str] = {
            "user_entitled_gpus": float(self.market.entitled[u].sum())
            if len(self.market.entitled) > u
            else 0.0,
            "due_gpus": rate,
            "lag_gpu_s": float(view.column("lag_gpu_s")[row]),
            "user_ahead_gpu_s": float(self.accounts.beyond[u].sum()),
        }
        if view.gpus[row] == 0 and rate > 0:
            found["quantum_ends_in_s"] = max(float(self.quantum_end_s) - now_s, 0.0)
        return found

    def entitled(self) -> FloatArray:
        """[user, type]: GPUs by tickets, before trading."""
        return self.market.entitled

    def traded(self) -> FloatArray:
        """[user, type]: GPUs won (or, below 0, given away) by trading."""
        return self.market.weights - self.market.entitled

    def report(self) -> dict[str, Any]:
        """What the run has to tell beyond shares: trades, measured speeds, migrations."""
        return {
            "trades": self.market.report(self.accounts.names, self._gpu_types),
            "profiles": self.measuring.report(self._gpu_types, self.accounts.names),
            "migrations": self.binding.migrations,
        }

    def state(self) -> dict[str, Any]:
        return {
            **super().state(),
            "gpu_types": list(self._gpu_types),
            "accounts": self.accounts.state(),
            "market": self.market.state(),
            "measuring": self.measuring.state(),
            "binding": self.binding.state(),
            "quantum_end_s": float(self.quantum_end_s) if np.isfinite(self.quantum_end_s) else None,
        }

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self._gpu_types = tuple(state["gpu_types"])
        self.accounts = Accounts(len(self._gpu_types))
        self.accounts.restore(state["accounts"])
        self.market.restore(state["market"])
        self.measuring.restore(state["measuring"])
        self.binding.restore(state["binding"])
        self.quantum_end_s = -np.inf if state["quantum_end_s"] is None else state["quantum_end_s"]
