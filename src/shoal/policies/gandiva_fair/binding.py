"""Binds jobs to nodes: new jobs, jobs of lost nodes, and jobs that migrate."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import numpy as np

from shoal.core.arrays import BoolArray, FloatArray, IntArray
from shoal.core.view import View
from shoal.policies.gandiva_fair import balancer, homes
from shoal.policies.gandiva_fair.dues import NO_DUE, demand_of_users, dues
from shoal.policies.gandiva_fair.quantum import Move, defragment, fill_idle
from shoal.policies.gandiva_fair.round import Round
from shoal.policies.gandiva_fair.spans import Span, number_spans, span_over
from shoal.policies.gandiva_fair.tables import NOWHERE, SPANS, Claims, Nodes, Rows, Spans, TypeTargets


class Binding:
    """Owns the spans of gangs and the times of migrations. The view's column `home` holds the node of a small job."""

    def __init__(self, *, balance_s: float, migrations: int, min_gain: float, rest_s: float) -> None:
        self.balance_s = balance_s
        self.most = migrations
        self.min_gain = min_gain
        self.rest_s = rest_s
        self.spans: dict[int, Span] = {}
        self.moved_s: dict[int, float] = {}
        self.migrations = 0
        #: Times of the migrations for users that were behind, in the last `balance_s`.
        self.relieved_s: list[float] = []
        self.balance_at_s = 0.0

    def look_up(self, view: View, nodes: Nodes) -> tuple[IntArray, IntArray, Spans]:
        """(home, GPU type, spans) of each row. Rows whose node is lost have no home."""
        home, types, spanning = homes.look_up(view.column("home"), view.requested_gpus, nodes)
        if not spanning:
            return home, types, number_spans(view.job_ids, home, {})
        for row in np.flatnonzero(home == SPANS).tolist():
            job = int(view.job_ids[row])
            span = self.spans.get(job, ())
            resized = sum(gpus for _, gpus in span) != view.requested_gpus[row]
            if resized or any(gpus > nodes.gpus[s] for s, gpus in span):
                self.spans.pop(job, None)
        spans = number_spans(view.job_ids, home, self.spans)
        types[spans.rows] = nodes.gpu_type[spans.node[spans.start[:-1]]]
        return home, types, spans

    def bind(self, r: Round, visits: dict[int, int]) -> None:
        """Give every job that can run a due and a home. `visits` are jobs to move to a type (row: type)."""
        can_run = homes.unbind_unusable(r.home, r.types, r.speed)
        moves = self._choose_types(r, can_run, visits)
        claims = Claims(r.view.user, r.types, r.size, r.view.weight, can_run)
        r.due[:] = dues(claims, r.weights, r.gpus_of_type)
        self._choose_nodes(r, np.flatnonzero(can_run & (r.home == NOWHERE)))
        r.moved |= set(moves)
        if self._balance_now(r):
            self.balance_at_s = r.now_s + self.balance_s
            if not r.pooled and self.most > len(moves):
                movable, most = self._rested(r), self.most - len(moves)
                for row, _ in balancer.balance(
                    r.jobs, r.nodes, movable, r.spanning_tickets(), most, self.min_gain
                ):
                    r.moved.add(row)
        for row in r.moved:
            self._record(r, row)
        self._store(r)

    def _choose_types(self, r: Round, can_run: BoolArray, visits: dict[int, int]) -> dict[int, int]:
        """Give every job a GPU type. Returns the rows that change their type, with the new type."""
        if len(r.speed) == 1:
            r.types[can_run] = 0
            return {}
        claims = Claims(r.view.user, r.types, r.size, r.view.weight, can_run)
        want = TypeTargets(
            r.view.user,
            r.size,
            r.speed,
            homes.targets(r.weights, r.demand),
            demand_of_users(claims, *r.weights.shape),
        )
        moves = visits
        if self._balance_now(r):
            ahead_first = np.argsort(-r.lag / np.maximum(r.due, NO_DUE), kind="stable")
            moves = dict(homes.retype(ahead_first, r.types, self._rested(r), self.most, want)) | visits
        for row, t in moves.items():
            r.home[row], r.types[row] = NOWHERE, t
        fresh = np.flatnonzero(can_run & (r.types < 0))
        r.types[fresh] = homes.choose_types(fresh, want)
        return moves

    def _balance_now(self, r: Round) -> bool:
        return r.new_quantum and r.now_s >= self.balance_at_s

    def _choose_nodes(self, r: Round, rows: Rows) -> None:
        if (r.home[r.spans.rows] > SPANS).any():  # some gangs have lost their nodes
            r.spans = number_spans(r.view.job_ids, r.home, self.spans)
        if not len(rows):
            return
        load = balancer.ticket_load(r.jobs, r.nodes, r.spanning_tickets())
        free = r.free((r.view.gpus > 0) & r.bound)
        homes.choose_nodes(rows, r.types, r.jobs, r.nodes, free, load)
        larger_than_any_node = rows[r.home[rows] == NOWHERE]
        for row in larger_than_any_node.tolist():
            size = int(r.size[row])
            span = span_over(size, int(r.types[row]), r.nodes, free, load)
            self._bind_span(r, row, span)
            for s, gpus in span:
                free[s] = max(free[s] - gpus, 0)
                load[s] += r.due[row] * gpus / size / r.nodes.gpus[s]
        if len(larger_than_any_node):
            r.spans = number_spans(r.view.job_ids, r.home, self.spans)

    def _bind_span(self, r: Round, row: int, span: Span) -> None:
        if span:
            self.spans[int(r.view.job_ids[row])] = span
            r.view.column("home")[row] = -1.0
            r.home[row] = SPANS

    def _rested(self, r: Round) -> BoolArray:
        """Rows that did not migrate in the last `rest_s`."""
        rested = np.ones(len(r.view), np.bool_)
        recent = [j for j, at in self.moved_s.items() if r.now_s - at < self.rest_s and j in r.view]
        rested[np.searchsorted(r.view.job_ids, recent)] = False
        return rested

    def _record(self, r: Round, row: int, *, rest: bool = True) -> None:
        if rest:
            self.moved_s[int(r.view.job_ids[row])] = r.now_s
        self.migrations += 1

    def _store(self, r: Round) -> None:
        small = r.home >= 0
        r.view.column("home")[small] = r.home[small] + 1.0
        r.view.column("home")[r.home == NOWHERE] = 0.0

    def may_move(self, r: Round, behind: BoolArray) -> tuple[BoolArray, int]:
        """(rows that may migrate because their user is behind, how many of them at most).

        Between two balancing passes no more jobs migrate for this reason than in one balancing pass.
        """
        self.relieved_s = [at for at in self.relieved_s if r.now_s - at < self.balance_s]
        most = self.most - len(self.relieved_s)
        if r.pooled or not r.new_quantum or most <= 0:
            return np.zeros(len(r.view), np.bool_), 0
        return behind & self._rested(r), most

    def rebind(self, r: Round, moves: list[Move], *, rest: bool) -> None:
        """Bind the rows of `moves` to their new nodes. With `rest` they do not migrate again for a while."""
        for row, entries in groupby(moves, key=lambda move: move[0]):
            span = tuple(sorted((node, gpus) for _, node, gpus in entries))
            r.types[row] = r.nodes.gpu_type[span[0][0]]
            if r.home[row] <= SPANS:
                self._bind_span(r, row, span)
            else:
                r.home[row] = span[0][0]
            r.moved.add(row)
            self._record(r, row, rest=rest)
            if rest:
                self.relieved_s.append(r.now_s)
        if moves:
            r.spans = number_spans(r.view.job_ids, r.home, self.spans)
            self._store(r)

    def fill_idle(self, r: Round, order: Rows, runs: BoolArray, free: IntArray, speed: FloatArray) -> None:
        """Waiting jobs move to idle GPUs and run there; `speed[type, row]` says which types each may take."""
        waiting = r.bound & ~runs
        if waiting.any() and free.any():
            moves = fill_idle(order, waiting, speed, r.jobs, r.nodes, free)
            runs[[row for row, _, _ in moves]] = True
            self.rebind(r, moves, rest=False)

    def defragment(self, r: Round, order: Rows, eligible: BoolArray, runs: BoolArray, free: IntArray) -> None:
        """Move running jobs together where that lets a waiting gang run."""
        every_row = np.ones(len(r.view), np.bool_)
        rested, most = self.may_move(r, every_row)
        waiting = eligible & ~runs
        if most and waiting.any() and free.any():
            moves = defragment(order, waiting & rested, runs & rested, most, r.jobs, r.nodes, free)
            runs[[row for row, _, _ in moves]] = True
            self.rebind(r, moves, rest=True)

    def left(self, job_id: int) -> None:
        self.spans.pop(job_id, None)
        self.moved_s.pop(job_id, None)

    def state(self) -> dict[str, Any]:
        return {
            "spans": {str(j): [list(p) for p in span] for j, span in self.spans.items()},
            "moved_s": {str(j): at for j, at in self.moved_s.items()},
            "migrations": self.migrations,
            "balance_at_s": self.balance_at_s,
            "relieved_s": self.relieved_s,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.spans = {int(j): tuple((int(s), int(g)) for s, g in span) for j, span in state["spans"].items()}
        self.moved_s = {int(j): at for j, at in state["moved_s"].items()}
        self.migrations = state["migrations"]
        self.balance_at_s = state["balance_at_s"]
        self.relieved_s = list(state.get("relieved_s", []))
