"""Fair shares between users by time slicing: Gandiva_fair (Chaudhary et al., EuroSys'20)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal.core.arrays import BoolArray, FloatArray, IntArray
from shoal.core.decision import Decision
from shoal.core.errors import ShoalError
from shoal.core.options import at_least_a_second
from shoal.core.plan import Placement
from shoal.core.reason import Code
from shoal.core.supply import Supply
from shoal.core.view import View
from shoal.core.words import spoken
from shoal.policies.base import Policy
from shoal.policies.gandiva_fair import homes
from shoal.policies.gandiva_fair.accounts import Accounts
from shoal.policies.gandiva_fair.binding import Binding
from shoal.policies.gandiva_fair.dues import NO_DUE, center_lags
from shoal.policies.gandiva_fair.market import Market
from shoal.policies.gandiva_fair.measuring import Measuring
from shoal.policies.gandiva_fair.profiling import Rules
from shoal.policies.gandiva_fair.quantum import split_stride
from shoal.policies.gandiva_fair.round import Round
from shoal.policies.gandiva_fair.tables import Nodes, Rows
from shoal.policies.own_jobs import by_priority

_PROFILING = ("given", "user", "job")
_TIES = ("oldest", "newest", "widest")

#: Passes, in seconds, that come before and after those of all users.
_FIRST = -1e10
_LAST = 1e10


@dataclass(frozen=True)
class GandivaFairOptions:
    #: Time slice. Gandiva uses 60 s: long compared with the pause of a switch, short for a person who waits.
    quantum_s: float = 60.0
    #: Whether users trade GPUs of different types.
    trading: bool = True
    #: Where speeds come from: given with the job, or measured per user or per job by visits to each type.
    profiling: str = "given"
    #: Longest duration of a visit, and the number of visits at a time.
    visit_s: float = 600.0
    visits: int = 4
    #: Measurements older than this are repeated.
    stale_s: float = 7 * 86400.0
    #: Load balancing: interval, migrations per interval, least gain in ticket load per GPU, and how long a migrated
    #: job is left alone. A migration takes about 10 s, so one in 600 s costs a job less than 2 % of its time.
    balance_s: float = 600.0
    migrations: int = 8
    min_gain: float = 0.05
    rest_s: float = 600.0
    #: Which of two jobs with equal passes goes first: oldest, newest or widest.
    tie_order: str = "oldest"
    #: The most that a user can be owed, or can owe, in quanta of its share (an hour). The rest is forgotten, so that a
    #: user that could not be served for long does not take over the cluster later.
    credit_quanta: float = 60.0
    #: A job that has waited for this many turns goes first. A turn is the mean time between two quanta of a job that
    #: receives its due. This bounds the wait of every job.
    patience_turns: float = 8.0
    #: Rounds of trades that are kept for the report.
    keep_rounds: int = 1000

    def __post_init__(self) -> None:
        at_least_a_second("quantum_s", self.quantum_s, "gandiva-fair")
        for name in ("visit_s", "balance_s", "credit_quanta", "patience_turns"):
            if not getattr(self, name) > 0:
                raise ShoalError(f"option {name} of policy 'gandiva-fair' must be above 0")
        for name in ("migrations", "visits", "min_gain", "rest_s"):
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

    A user's tickets give it a share of every GPU type: weighted water-filling over the active users. Trading changes
    the shares. A user's share of a type is divided equally among its jobs there; this is what each job is due.

    Jobs are bound to nodes. At the end of every quantum each node runs gang-aware stride: jobs run in ascending order
    of their pass; a gang that does not fit is skipped and keeps its pass. A central scheduler orders the gangs that
    span nodes against one aggregate per node. A load balancer keeps the ticket load per GPU even over the nodes. Idle
    GPUs take waiting jobs from other nodes, and jobs move together where that lets a waiting gang run (Chaudhary et
    al., EuroSys'20; Xiao et al., OSDI'18).

    Gangs do not load nodes evenly, so stride on each node alone does not give users their shares of the cluster.
    Three rules, not in the paper, correct this:
    1. Jobs are sorted by the pass of their user, which counts GPU time on all nodes, and then by their own.
    2. If a user is owed a quantum of a gang, the gang migrates to other nodes when it does not fit on its own.
    3. A job that has waited for `patience_turns` turns goes first.

    State of each job: its lag in GPU-seconds; its home (node + 1; 0: none yet; -1: it spans nodes, see `Binding`); and
    the GPUs that it is due.
    """

    name = "gandiva-fair"
    columns = ("lag_gpu_s", "home", "due_gpus")
    summary = "fair shares by tickets: split stride, migration, trading of mixed GPUs (EuroSys'20)"
    elastic = False
    uses_tickets = uses_weights = True
    Options = GandivaFairOptions
    removed_options = ("pull", "forget_s", "correct_s", "debt_quanta", "relief_quanta")

    @property
    def quantum(self) -> str:
        return (
            f"jobs keep their GPUs for a quantum of {spoken(self.options.quantum_s)}, then others have a turn"
        )

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
        # 1. Settle the accounts of users and jobs up to now.
        if self._gpu_types != view.gpu_types:
            self._gpu_types, self.accounts = view.gpu_types, Accounts(len(view.gpu_types))
        self.accounts.set_users(supply.cluster.users)
        span_s = self.accounts.settle(now_s)
        view.column("lag_gpu_s")[:] += (view.gpus - view.column("due_gpus")) * span_s
        if not len(view):
            self.market.close(len(supply.cluster.users), len(view.gpu_types))
            self._set_shares(view)
            self.accounts.set_gpus(view.gpus, view.gpu_type, view.user)
            return Decision(np.zeros(0, np.int32), np.zeros(0, np.int32))
        # 2. Compute the users' shares of each type, after trading.
        r = self._round(view, supply, now_s)
        self._set_shares(view)
        # 3. Bind jobs to types and nodes, and compute what each is due.
        visits = self.measuring.send(view, r.types, r.speed, now_s) if r.new_quantum else {}
        self.binding.bind(r, visits)
        # 4. Choose the jobs that run: all anew at the end of a quantum, otherwise only on free GPUs.
        runs = self._run(r)
        self.accounts.set_gpus(np.where(runs, r.size, 0).astype(np.int32), r.types, view.user)
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
            view=view,
            nodes=nodes,
            pooled=supply.cluster.pooled,
            gpus_of_type=supply.gpus_of_type,
            now_s=now_s,
            new_quantum=new_quantum,
            speed=speed,
            demand=demand,
            weights=self.market.weights,
            home=home,
            types=types,
            spans=spans,
        )

    def _set_shares(self, view: View) -> None:
        """A user must be able to save for its largest gang, and to owe as much after the gang ran: two quanta of it."""
        quantum_s = self.options.quantum_s
        largest_gpus = float(view.requested_gpus.max(initial=0))
        self.accounts.set_shares(
            self.market.weights, self.options.credit_quanta * quantum_s, 2.0 * quantum_s * largest_gpus
        )

    def _passes(self, r: Round) -> FloatArray:
        """The pass of each row's user, in seconds; `_FIRST` or less for rows that must run, `_LAST` without a share."""
        passes = self.accounts.passes()[r.view.user, np.maximum(r.types, 0)]
        passes[(r.due <= NO_DUE) | np.isinf(passes)] = _LAST
        waited_s = np.where(r.view.gpus == 0, r.now_s - r.view.changed_s, 0.0)
        waited_turns = waited_s * r.due / (r.size * self.options.quantum_s)
        starving = waited_turns > self.options.patience_turns
        passes[starving] = _FIRST * waited_turns[starving]
        passes[self.measuring.rows_on_visit(r.view)] = _FIRST
        return np.asarray(passes.round(6))  # equal but for rounding: to the microsecond

    def _order(self, r: Round, passes: FloatArray) -> Rows:
        """Rows by the pass of their user, then by their own, then in tie order. Rows of the view are by age."""
        own = (r.lag / np.maximum(r.due, NO_DUE)).round(6)
        if self.options.tie_order == "newest":
            order = np.lexsort((-r.view.job_ids, own, passes))
        elif self.options.tie_order == "widest":
            order = np.lexsort((-r.size, own, passes))
        else:
            order = np.lexsort((own, passes))
        return by_priority(order, r.view.user, r.view.priority)

    def _run(self, r: Round) -> BoolArray:
        """Which rows run from now on. Rows that migrate are bound to their new nodes."""
        view, bound = r.view, r.bound
        center_lags(r.lag, r.due, view.user, r.types, *r.weights.shape)
        if r.all_fit:
            return bound
        passes = self._passes(r)
        order = self._order(r, passes)
        keep = np.zeros(len(view), np.bool_) if r.new_quantum else (view.gpus == r.size) & bound
        shares_type = r.owned[view.user, np.maximum(r.types, 0)]
        eligible = bound & shares_type
        eligible[self.measuring.rows_on_visit(view)] = True
        runs, free = self._stride(r, order, passes, eligible, keep)
        own_types = np.where(r.owned[view.user].T, r.speed, 0.0)
        self.binding.fill_idle(r, order, runs, free, own_types)
        not_ahead = eligible & (passes <= 0)
        self.binding.defragment(r, order, not_ahead, runs, free)
        if len(r.speed) > 1:
            # Jobs whose user has no share of a type run there on GPUs that the others leave idle.
            runs, free = self._stride(r, order, passes, bound, runs)
            self.binding.fill_idle(r, order, runs, free, r.speed)
        return runs

    def _stride(
        self, r: Round, order: Rows, passes: FloatArray, eligible: BoolArray, keep: BoolArray
    ) -> tuple[BoolArray, IntArray]:
        owed = -self.accounts.beyond[r.view.user, np.maximum(r.types, 0)]
        behind = (owed >= r.size * self.options.quantum_s) | (passes <= _FIRST)
        may_move, most = self.binding.may_move(r, behind & ~keep)
        runs, free, moves = split_stride(
            order, passes, r.jobs, r.spans, r.nodes, eligible, keep, behind, may_move, most
        )
        self.binding.rebind(r, moves, rest=True)
        return runs, free

    def _decision(self, r: Round, runs: BoolArray) -> Decision:
        gpus = np.where(runs, r.size, 0).astype(np.int32)
        codes = np.where(r.bound, 0, int(Code.INFEASIBLE)).astype(np.int8)
        placements: dict[int, Placement] | None = None
        if not r.pooled:
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

    # -- questions and saved state -----------------------------------------------------------------

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
        """[user, type]: GPUs gained (below 0: given away) by trading."""
        return self.market.weights - self.market.entitled

    def report(self) -> dict[str, Any]:
        """Trades, measured speeds and migrations."""
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
