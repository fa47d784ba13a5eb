"""How a job gets from its generation to the target: the next plan, its commit, and what each worker is told."""

from __future__ import annotations

from dataclasses import replace

from shoal.wire import events as ev
from shoal.wire.events import Send
from shoal.wire.messages import Kind, Order, Phase, Plan
from shoal.wire.record import Record
from shoal.wire.views import Generation, Pending, WorkerView


class Planning(Record):
    def learners(self) -> list[str]:
        """Members of the active generation that look on while they are given the state."""
        if self.active is None:
            return []
        views = [v for w in self.active.members if (v := self.workers.get(w)) is not None]
        return [v.worker for v in views if v.status.torn and v.status.generation == self.active.number]

    def _settle_pending(self) -> None:
        if self.pending is None:
            return
        plan = self.pending.plan
        members = [self.workers[w] for w in plan.members]
        if not self.pending.committed:
            if any(v.status.broken == plan.number for v in members):
                self.pending = None  # a group that could not be formed: try again under a new number
                return
            if self._obsolete(plan):
                self.pending = None
                return
            formed = all(
                v.status.formed == plan.number or v.status.generation == plan.number for v in members
            )
            # Who stays must have the whole state before anyone who has it may leave.
            if formed and not set(self.learners()) & set(plan.members):
                self.pending.committed = True
                self.crew = tuple(dict.fromkeys((*self.crew, *plan.members)))
            else:
                return
        elif plan.kind in (Kind.RECOVER, Kind.FIRST) and any(v.status.broken == plan.number for v in members):
            self._break()
            return
        self._complete(plan, members)

    def _complete(self, plan: Plan, members: list[WorkerView]) -> None:
        if not all(self._arrived(v, plan) for v in members):
            return
        before = (*plan.holders, *plan.learners)
        leavers = [self.workers[w] for w in before if w not in plan.members]
        if any(v.alive and v.status.phase not in (Phase.LEFT, Phase.FINISHED) for v in leavers):
            return
        for view in leavers:
            self._emit(ev.WorkerLeft(view.worker))
        # A newer target may want one of them back, too late: its process ends, a new worker must take its place.
        self.target = tuple(w for w in self.target if w not in before or w in plan.members)
        self.pending = None
        self.active = Generation(plan.number, plan.members) if plan.members else None
        self.crew = plan.members
        self.paused = None
        if plan.kind is Kind.PAUSE:
            step = max((v.status.step for v in leavers), default=0)
            self.paused = next((v.status.saved for v in leavers if v.status.saved), None)
            self._emit(ev.JobPaused(self.paused or "", step))
        else:
            self.untold = plan.kind

    @staticmethod
    def _arrived(view: WorkerView, plan: Plan) -> bool:
        """In a switch newcomers may still be given the state: the next plan can be prepared meanwhile."""
        status = view.status
        working = status.phase is Phase.ACTIVE and (plan.kind is Kind.SWITCH or not status.torn)
        return status.generation == plan.number and (working or status.phase is Phase.FINISHED)

    def _announce(self) -> None:
        """Tell of a new generation once all its members have the whole state."""
        if self.untold is None or self.active is None or self.learners():
            return
        views = [v for w in self.active.members if (v := self.workers.get(w)) is not None]
        if any(v.status.generation < self.active.number for v in views):
            return  # not heard of since this coordinator came back
        step = max((v.status.step for v in views), default=0)
        self.stragglers.reset()
        self._emit(ev.GenerationCommitted(self.active.number, self.active.members, step, Kind(self.untold)))
        self.untold = None

    def _obsolete(self, plan: Plan) -> bool:
        wish = self._wish()
        return wish is None or (wish[0], wish[1]) != (plan.kind, plan.members)

    def _wish(self) -> tuple[Kind, tuple[str, ...]] | None:
        """The generation that would bring the job nearer to its target, whether it can be formed yet or not."""
        wanted = tuple(w for w in self.target if w in self.workers and self.workers[w].alive)
        if self.active is None:
            return (Kind.FIRST, wanted) if wanted else None
        if not wanted:
            # The target may also be empty because all newcomers died: then the job goes on as it is.
            return (Kind.PAUSE, ()) if self.pausing else None
        current = self.active.members
        given_up = [w for w in self.learners() if w not in wanted]
        if given_up:
            return Kind.SWITCH, tuple(w for w in current if w not in given_up)
        newcomers = tuple(w for w in wanted if w not in current)
        if newcomers:
            return Kind.SWITCH, current + newcomers
        remaining = tuple(w for w in current if w in wanted)
        return (Kind.SWITCH, remaining) if remaining != current else None

    def _plan_next(self) -> None:
        if self.pending is not None or self.outcome is not None:
            return
        wish = self._wish()
        if wish is None:
            return
        kind, members = wish
        current = self.active.members if self.active else ()
        newcomers = [self.workers[w] for w in members if w not in current]
        if all(v.announced and v.connected and v.status.phase is Phase.READY for v in newcomers):
            learners = tuple(w for w in self.learners() if w not in members)
            holders = tuple(w for w in current if w not in learners)
            self._issue(kind, members, holders=holders, learners=learners)

    def _issue(
        self,
        kind: Kind,
        members: tuple[str, ...],
        holders: tuple[str, ...],
        learners: tuple[str, ...] = (),
        resume: int = 0,
    ) -> None:
        self.issued += 1
        newcomers = [w for w in members if w not in holders]
        plan = Plan(
            number=self.issued,
            kind=kind,
            members=members,
            previous=self.active.number if self.active else 0,
            holders=holders,
            learners=learners,
            replaces=dict(zip(newcomers, [w for w in holders if w not in self.target])),
            addresses={w: self.workers[w].status.address for w in newcomers},
            resume=resume,
            restore=(self.paused or self.checkpoint) if kind is Kind.FIRST else None,
            save=self.pause_path if kind is Kind.PAUSE else None,
        )
        # Halted members go on as soon as a recovery group stands; and a pause needs no group.
        self.pending = Pending(plan, committed=kind in (Kind.RECOVER, Kind.PAUSE))
        if kind is Kind.FIRST:
            self.crew = members
            self.pending.committed = True

    def _dispatch(self) -> None:
        for view in self.workers.values():
            if not view.alive or not view.connected:
                continue
            order = self._order_for(view)
            if order != replace(view.sent, seq=0) or view.sent.seq == 0:
                view.sent = replace(order, seq=view.sent.seq + 1)
                self._effects.append(Send(view.worker, view.sent))

    def _order_for(self, view: WorkerView) -> Order:
        plan = self.pending.plan if self.pending else None
        mine = (
            plan
            if plan is not None and view.worker in (*plan.members, *plan.holders, *plan.learners)
            else None
        )
        return Order(
            seq=0,
            dead=self.dead,
            plan=mine,
            commit=bool(mine and self.pending and self.pending.committed),
            board=self._board(mine) if mine and view.worker in mine.members else {},
            signed=view.announced,
            first=self.active is None,
            checkpoint=self.checkpoints_asked,
            stop=view.why if view.stopping else None,
        )

    def _board(self, plan: Plan) -> dict[str, str]:
        """The entries of all members, once there is one from each: one message instead of one per entry."""
        entries: dict[str, str] = {}
        for view in self._alive(plan.members):
            if view.status.board_of != plan.number or not view.status.board:
                return {}
            entries |= view.status.board
        return entries
