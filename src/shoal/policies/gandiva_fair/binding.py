"""Binding jobs to nodes: new ones, those whose node is lost, those that move for balance or for idle GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from shoal.core.view import View
from shoal.policies.gandiva_fair import balancer, guard, homes, kernels, relief
from shoal.policies.gandiva_fair.kernels import NOWHERE, SPANS, BoolArray, FloatArray, IntArray
from shoal.policies.gandiva_fair.round import Nodes, Round, Rows
from shoal.policies.gandiva_fair.scenes import outsets
from shoal.policies.gandiva_fair.spans import NO_SPANS, Span, SpanArrays, number_spans, span_over


class Binding:
    """Remembers spans, and when jobs moved; the node of a small job is in the view's column `home`."""

    def __init__(self, *, balance_s: float, migrations: int, min_gain: float, rest_s: float) -> None:
        self.balance_s = balance_s
        self.most = migrations
        self.min_gain = min_gain
        self.rest_s = rest_s
        self.spans: dict[int, Span] = {}
        self.moved_s: dict[int, float] = {}
        self.migrations = 0
        #: When jobs were moved to relieve their users, in the last `balance_s`.
        self.relieved_s: list[float] = []
        self.balance_at_s = 0.0

    def look_up(self, view: View, nodes: Nodes) -> tuple[IntArray, IntArray, SpanArrays]:
        """(home, type, spans) of each row. A home on a node that is lost is none."""
        home, types, spanning = homes.look_up(
            view.column("home"), view.requested_gpus, nodes.gpus, nodes.type_of
        )
        if not spanning:
            return home, types, NO_SPANS
        for row in np.flatnonzero(home == SPANS).tolist():  # its owner has changed its size
            job = int(view.job_ids[row])
            if sum(gpus for _, gpus in self.spans.get(job, ())) != view.requested_gpus[row]:
                self.spans.pop(job, None)
        spans = number_spans(view.job_ids, home, self.spans)
        broken = spans.gpus > nodes.gpus[spans.node]
        if broken.any():
            for row in spans.rows[np.searchsorted(spans.start, np.flatnonzero(broken), side="right") - 1]:
                self.spans.pop(int(view.job_ids[row]), None)
            spans = number_spans(view.job_ids, home, self.spans)
        types[spans.rows] = nodes.type_of[spans.node[spans.start[:-1]]]
        return home, types, spans

    def bind(
        self, r: Round, corrections: FloatArray, visits: dict[int, int], order: Callable[[], Rows]
    ) -> None:
        """Give every job that can run a home and a due, moving some to other types (`visits`: row, type).

        `order()` are the rows by pass, where they are needed.
        """
        can_run = homes.set_adrift(r.home, r.types, r.speed)
        moves = self._choose_types(r, can_run, visits, order)
        r.rate[:] = kernels.due_rates(
            r.weights * corrections,
            r.gpus_of_type,
            r.view.user,
            r.types,
            r.size,
            r.view.weight,
            can_run,
        )
        self._choose_nodes(r, np.flatnonzero(can_run & (r.home == NOWHERE)))
        r.moved |= set(moves)
        if self._due(r):
            self._balance(r, self.most - len(moves))
            self.balance_at_s = r.now_s + self.balance_s
        for row in r.moved:
            self._note(r, row)
        self._store(r)

    def _choose_types(
        self, r: Round, can_run: BoolArray, visits: dict[int, int], order: Callable[[], Rows]
    ) -> dict[int, int]:
        """Give every job a type; the rows that leave theirs for another, with it."""
        if len(r.speed) == 1:
            r.types[can_run] = 0
            return {}
        target = homes.targets(r.weights, r.demand)
        bound = kernels.demand_of_users(r.view.user, r.types, r.size, can_run, *r.weights.shape)
        moves = visits
        if self._due(r):
            # Those furthest ahead of their due go first, and before them those that have none where they are.
            last_first = np.ascontiguousarray(order()[::-1])
            moved = homes.retype(
                last_first, r.view.user, r.size, r.types, r.speed, target, bound, self._rested(r), self.most
            )
            moves = dict(moved) | visits
        for row, t in moves.items():
            r.home[row], r.types[row] = NOWHERE, t
        fresh = np.flatnonzero(can_run & (r.types < 0))
        if len(fresh):
            r.types[fresh] = homes.choose_types(fresh, r.view.user, r.size, r.speed, target, bound)
        return moves

    def _due(self, r: Round) -> bool:
        return r.new_quantum and r.now_s >= self.balance_at_s

    def _choose_nodes(self, r: Round, rows: Rows) -> None:
        if (r.home[r.spans.rows] > SPANS).any():  # some have left their nodes
            r.spans = number_spans(r.view.job_ids, r.home, self.spans)
        if not len(rows):
            return
        load = balancer.ticket_load(r.rate, r.home, r.nodes.gpus, r.bound, r.spanning_tickets())
        free = r.free((r.view.gpus > 0) & r.bound)
        r.home[rows] = homes.choose_nodes(
            rows, r.types, r.size, r.rate, r.nodes.type_of, r.nodes.gpus, free, load
        )
        if (r.home[rows] >= 0).all():
            return
        for row in rows[r.home[rows] < 0].tolist():
            size = int(r.size[row])
            span = span_over(size, int(r.types[row]), r.nodes.type_of, r.nodes.gpus, free, load)
            self._bind_span(r, row, span)
            for s, gpus in span:
                free[s] = max(free[s] - gpus, 0)
                load[s] += r.rate[row] * gpus / size / r.nodes.gpus[s]
        r.spans = number_spans(r.view.job_ids, r.home, self.spans)

    def _bind_span(self, r: Round, row: int, span: Span) -> None:
        if span:
            self.spans[int(r.view.job_ids[row])] = span
            r.view.column("home")[row] = -1.0
            r.home[row] = SPANS

    def _balance(self, r: Round, most: int) -> None:
        if r.nodes.pooled or most <= 0:
            return
        moves = balancer.balance(
            r.rate,
            r.size,
            r.home,
            r.nodes.gpus,
            r.nodes.type_of,
            self._rested(r),
            r.bound,
            r.spanning_tickets(),
            most,
            self.min_gain,
        )
        r.moved.update(row for row, _ in moves)

    def _rested(self, r: Round) -> BoolArray:
        rested = np.ones(len(r.view), np.bool_)
        tired = [j for j, at in self.moved_s.items() if r.now_s - at < self.rest_s and j in r.view]
        rested[np.searchsorted(r.view.job_ids, tired)] = False
        return rested

    def _note(self, r: Round, row: int, *, rest: bool = True) -> None:
        if rest:
            self.moved_s[int(r.view.job_ids[row])] = r.now_s
        self.migrations += 1

    def _store(self, r: Round) -> None:
        small = r.home >= 0
        r.view.column("home")[small] = r.home[small] + 1.0
        r.view.column("home")[r.home == NOWHERE] = 0.0

    def attract(self, r: Round, order: Rows, runs: BoolArray, free: IntArray, *, borrow: bool) -> None:
        """Idle GPUs take in waiting jobs from elsewhere: they run, and are bound there from now on.

        Users who have a part of the type come first, and those who would `borrow` it only then, if at all.
        """
        waiting = r.bound & ~runs
        if not (waiting.any() and free.any()):
            return
        theirs = np.where(r.owned[r.view.user].T, r.speed, 0.0)
        self._attract_small(r, order, runs, free, theirs)
        if borrow:
            if len(r.speed) > 1:
                self._attract_small(r, order, runs, free, r.speed)
            self._attract_spans(r, order, runs, free)
        self._store(r)

    def _attract_small(
        self, r: Round, order: Rows, runs: BoolArray, free: IntArray, speed: FloatArray
    ) -> None:
        waiting = r.bound & ~runs & (r.home >= 0)
        for row, node in balancer.attract(order, r.size, waiting, speed, r.nodes.type_of, free, r.home):
            runs[row] = True
            r.types[row] = r.nodes.type_of[node]
            r.moved.add(row)
            self._note(r, row, rest=False)

    def _attract_spans(self, r: Round, order: Rows, runs: BoolArray, free: IntArray) -> None:
        nothing = np.zeros(len(free))
        idle = np.bincount(r.nodes.type_of, weights=free, minlength=len(r.speed))
        waiting = order[(r.home[order] <= SPANS) & ~runs[order] & (r.size[order] <= idle.max())]
        for row in waiting.tolist():
            size = int(r.size[row])
            if size > idle.max():
                continue
            for t in np.argsort(-r.speed[:, row]).tolist():
                if r.speed[t, row] <= 0 or idle[t] < size:
                    continue
                span = span_over(size, t, r.nodes.type_of, r.nodes.gpus, free, nothing)
                self._bind_span(r, row, span)
                for s, gpus in span:
                    free[s] -= gpus
                idle[t] -= size
                runs[row], r.types[row] = True, t
                r.moved.add(row)
                self._note(r, row, rest=False)
                break

    def relieve(
        self,
        r: Round,
        order: Rows,
        passed: FloatArray,
        eligible: BoolArray,
        behind: BoolArray,
        runs: BoolArray,
        free: IntArray,
    ) -> None:
        """Move waiting jobs of those who are `behind` to where they push out those who need it least.

        No more than the balancer may move in one pass are moved in the time between two.
        """
        most = self._moves_left(r)
        if most <= 0 or not (behind & ~runs).any():
            return
        moving = behind & ~runs & self._rested(r)
        moves = relief.take_in(
            order,
            passed,
            r.size,
            r.home,
            r.types,
            r.nodes.type_of,
            r.nodes.gpus,
            eligible,
            moving,
            most,
            runs,
            free,
        )
        for row, _ in moves:
            r.moved.add(row)
            self._note(r, row)
            self.relieved_s.append(r.now_s)
        self._store(r)

    def _moves_left(self, r: Round) -> int:
        """How many jobs may still be moved for their users' sake, of those that may be in `balance_s`."""
        self.relieved_s = [at for at in self.relieved_s if r.now_s - at < self.balance_s]
        return self.most - len(self.relieved_s)

    def steer(self, r: Round, passed: FloatArray, runs: BoolArray, free: IntArray) -> None:
        """Run other sets where these would take a user too far off its part: see `guard`."""
        rested, waited_turns = self._rested(r), r.waited_turns
        for outset in outsets(r):
            rows, nodes, scene = outset.rows, outset.nodes, outset.scene
            before = guard.Choice(runs[rows], free[nodes].astype(np.int64), outset.place)
            longest = np.argsort(-waited_turns[rows], kind="stable")
            pressed = longest[waited_turns[rows[longest]] >= 0.5 * r.patience_turns]
            if not guard.in_question(scene, before, pressed):
                continue
            choice = guard.steer(
                scene,
                before,
                before.runs & (passed[rows] < relief.FIRST),
                rested[rows],
                self._moves_left(r),
                np.argsort(passed[rows], kind="stable"),
                pressed,
            )
            runs[rows], free[nodes] = choice.runs, choice.free
            for k in np.flatnonzero((choice.place != before.place).any(axis=1)).tolist():
                row, taken = int(rows[k]), choice.place[k]
                span = tuple((int(nodes[s]), int(taken[s])) for s in np.flatnonzero(taken))
                if k < scene.small:
                    r.home[row] = span[0][0]
                else:
                    self._bind_span(r, row, span)
                r.moved.add(row)
                self._note(r, row)
                self.relieved_s.append(r.now_s)
        self._store(r)
        if len(r.spans.rows):
            r.spans = number_spans(r.view.job_ids, r.home, self.spans)

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
