"""The coordinator of one job: which workers it shall have, and how it gets there. Pure: no I/O, no clock.

Every input (`set_target`, `received`, `exited`, `tick`, ...) returns effects. After each, `_advance` looks at the
whole state and does what is next, so a repeated or late input does no harm. Per job there is an `active`
generation and at most one `pending` one:

    newcomers and leavers    first the union of both (newcomers take the state over while the old ones compute one
                             more step), then the switch without the leavers
    newer target             an uncommitted plan is replaced at once; a committed one is a step or two from done
    a member lost            everything issued so far is declared dead, survivors halt and say how far they came,
                             a recovery generation goes on from the last completed step
    no one left              the next target starts from the last checkpoint
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from shoal.wire import events as ev
from shoal.wire.events import Effect, Emit, Send, StartWorker, StopWorker
from shoal.wire.messages import Kind, Order, Phase, Plan, Report, Status, from_plain, to_plain
from shoal.wire.straggler import StragglerRule
from shoal.wire.views import Generation, Pending, Timing, WorkerView, first_difference, resume_step

__all__ = ["Generation", "JobCoordinator", "Timing", "WorkerView"]


class JobCoordinator:
    def __init__(self, job: str, timing: Timing | None = None, pause_path: str = "") -> None:
        self.job = job
        self.timing = timing or Timing()
        self.pause_path = pause_path
        self.target: tuple[str, ...] = ()
        self.pausing = False
        self.active: Generation | None = None
        self.pending: Pending | None = None
        self.recovering = False
        self.crew: tuple[str, ...] = ()  # everyone who may hold state, in rank order
        self.dead = 0
        self.issued = 0
        self.signature: tuple[str, ...] | None = None
        self.checkpoint: str | None = None
        self.checkpoint_step = 0
        self.checkpoints_asked = 0
        self.paused: str | None = None
        self.outcome: str | None = None
        self.stranded = False
        self.workers: dict[str, WorkerView] = {}
        self.stragglers = StragglerRule()
        self._effects: list[Effect] = []
        self._now_s = 0.0

    # Inputs

    def set_target(self, workers: Sequence[str], now_s: float) -> list[Effect]:
        """The workers the job shall have, in the wished rank order. None: pause. Ids are never used again."""
        if len(set(workers)) != len(workers):
            raise ValueError("a worker is named twice in the target")
        gone = [w for w in workers if w in self.workers and not self.workers[w].alive]
        if gone:
            raise ValueError(f"worker {gone[0]!r} has ended; give its replacement a new id")
        self._now_s = now_s
        if self.outcome is None:
            self.target, self.pausing = tuple(workers), not workers
            for w in workers:
                if w not in self.workers:
                    self.workers[w] = WorkerView(w, since_s=now_s, heard_s=now_s)
                    self._effects.append(StartWorker(w))
        return self._advance()

    def ask_checkpoint(self, now_s: float) -> list[Effect]:
        self._now_s = now_s
        self.checkpoints_asked += 1
        return self._advance()

    def stop(self, why: str, now_s: float) -> list[Effect]:
        """End the job now, without saving."""
        self._now_s = now_s
        self._end("stopped", ev.JobFailed("", why))
        return self._advance()

    def connected(self, worker: str, now_s: float) -> list[Effect]:
        """A worker has (re)connected; its first status follows."""
        self._now_s = now_s
        view = self.workers.get(worker)
        if view is None:
            # A coordinator that lost its memory: `received` rebuilds it from what the worker says.
            view = self.workers[worker] = WorkerView(worker, since_s=now_s)
        view.connected, view.met, view.heard_s = True, True, now_s
        view.status = replace(view.status, seq=0)
        view.sent = Order(seq=0)
        return self._advance()

    def disconnected(self, worker: str, now_s: float) -> list[Effect]:
        self._now_s = now_s
        if worker in self.workers:
            self.workers[worker].connected = False
            self.workers[worker].heard_s = now_s
        return self._advance()

    def exited(self, worker: str, why: str, now_s: float) -> list[Effect]:
        """The executor saw the worker's process end."""
        self._now_s = now_s
        view = self.workers.get(worker)
        if view is None or not view.alive:
            return []
        self._gone(view, why)
        if not view.met and self.issued == 0 and not view.stopping:
            # The script itself does not start: trying again would fail again.
            self._end(
                "failed",
                ev.JobFailed(
                    worker,
                    f"{why} before it reached shoal.torch.init(): only an elastic script can have a range of GPUs "
                    "(any other command: a fixed number)",
                ),
            )
        return self._advance()

    def received(self, worker: str, message: Status | Report, now_s: float) -> list[Effect]:
        self._now_s = now_s
        view = self.workers.get(worker)
        if view is None or not view.alive:
            return []
        view.heard_s = now_s
        if isinstance(message, Report):
            self._measure(view, message)
        elif message.seq > view.status.seq:
            self._take(view, message)
        return self._advance()

    def tick(self, now_s: float) -> list[Effect]:
        """Call about once a second: time-outs, and everything unanswered is said again."""
        self._now_s = now_s
        for view in list(self.workers.values()):
            if view.alive:
                self._check_life(view)
        effects = self._advance()
        if self.pending is not None or self.recovering:
            said = {e.worker for e in effects if isinstance(e, Send)}
            effects += [
                Send(v.worker, v.sent)
                for v in self.workers.values()
                if v.alive and v.connected and v.sent.seq and v.worker not in said
            ]
        return effects

    # Taking in

    def _take(self, view: WorkerView, status: Status) -> None:
        before, view.status = view.status, status
        if status.signature is None:
            view.status = replace(status, signature=before.signature)
        self.issued = max(self.issued, status.seen, status.generation, status.dead)
        if status.arrived != view.arrived:
            view.arrived, view.arrived_s = status.arrived, self._now_s
        if status.phase is Phase.HALTED and before.phase is not Phase.HALTED:
            view.halted_s = self._now_s
        if status.phase is Phase.ACTIVE and self.active is None and self.pending is None and not self.crew:
            self._rebuild(status)
        if status.phase is Phase.READY and not view.announced:
            self._welcome(view)
        if status.phase is Phase.FAILED:
            self._failed(view, status.why or "the script failed without saying why")

    def _rebuild(self, status: Status) -> None:
        """This coordinator remembers nothing, but the worker is training: believe it."""
        self.active = Generation(status.generation, status.members)
        self.crew = status.members
        for w in status.members:
            if w not in self.workers:
                self.workers[w] = WorkerView(w, since_s=self._now_s, heard_s=self._now_s, met=True)
        if not self.target and not self.pausing:
            self.target = status.members

    def _welcome(self, view: WorkerView) -> None:
        signature = view.status.signature
        if signature is None:
            return
        if self.signature is None:
            self.signature = signature
        difference = first_difference(self.signature, signature)
        if difference:
            self._failed(view, f"worker {view.worker} does not fit the job: {difference}")
            return
        view.announced = True
        self._emit(ev.WorkerReady(view.worker))

    def _failed(self, view: WorkerView, why: str) -> None:
        trainee = self.active is not None and view.worker not in self.active.members
        if trainee:
            self._emit(ev.WorkerRefused(view.worker, why))
            self._gone(view, why, quiet=True)
            self._effects.append(StopWorker(view.worker, kill=False, why="refused"))
        else:
            view.alive = False
            self._end("failed", ev.JobFailed(view.worker, why))

    def _measure(self, view: WorkerView, report: Report) -> None:
        self._emit(ev.Measured(view.worker, report))
        if report.pause_s is not None:
            self._emit(ev.PauseMeasured(view.worker, report.pause_generation, report.pause_s))
        if report.saved is not None:
            self.checkpoint, self.checkpoint_step = report.saved, report.saved_step
            self._emit(ev.Checkpointed(report.saved, report.saved_step))
        members = self.active.members if self.active else ()
        slow = self.stragglers.observe(view.worker, report, members)
        if slow is not None:
            self._emit(ev.StragglerFound(*slow))

    # Life and death

    def _check_life(self, view: WorkerView) -> None:
        silent_s = self._now_s - view.heard_s
        status, timing = view.status, self.timing
        if view.connected and silent_s > timing.heartbeat_timeout_s:
            self._lose(view, f"no sign of life for {silent_s:.1f} s")
        elif not view.connected and view.met and silent_s > timing.reconnect_s:
            self._lose(view, "its connection closed")
        elif status.phase is Phase.STARTING and self._now_s - view.since_s > timing.start_s:
            self._lose(view, f"not ready after {timing.start_s:.0f} s")
        elif status.phase is Phase.ACTIVE and not self.recovering and self._hangs(view):
            self._lose(view, f"did not arrive at step {view.arrived + 1} where the others wait")

    def _hangs(self, view: WorkerView) -> bool:
        """Others wait for it at a step where it has not arrived for a long time."""
        peers = [
            p
            for w in view.status.members
            if (p := self.workers.get(w)) and p.alive and p.status.generation == view.status.generation
        ]
        ahead = [p.arrived_s for p in peers if p.arrived > view.arrived]
        return bool(ahead) and self._now_s - max(*ahead, view.arrived_s) > self.timing.hang_s

    def _lose(self, view: WorkerView, why: str) -> None:
        self._gone(view, why)
        self._effects.append(StopWorker(view.worker, kill=True, why=why))

    def _gone(self, view: WorkerView, why: str, quiet: bool = False) -> None:
        """The worker is no more. Only the loss of one who may hold state and was to go on breaks anything."""
        view.alive, view.connected = False, False
        self.target = tuple(w for w in self.target if w != view.worker)
        self.stragglers.forget(view.worker)
        expected = view.stopping or view.status.phase in (Phase.LEFT, Phase.FINISHED)
        member = view.worker in self.crew
        if not expected and not quiet:
            self._emit(ev.WorkerLost(view.worker, why, member))
        if member and view.status.phase not in (Phase.LEFT, Phase.FINISHED):
            self._break()
        elif self.pending and not self.pending.committed and view.worker in self.pending.plan.members:
            self.pending = None

    def _break(self) -> None:
        self.recovering, self.dead, self.pending = True, self.issued, None

    # What is next

    def _advance(self) -> list[Effect]:
        if self.outcome is None:
            self._notice_broken_steps()
            self._finish_if_done()
        if self.outcome is None:
            if self.recovering:
                self._recover()
            if not self.recovering:
                self._settle_pending()
                self._plan_next()
                self._tell_if_stranded()
            self._stop_unwanted()
        self._dispatch()
        effects, self._effects = self._effects, []
        return effects

    def _alive(self, workers: Iterable[str]) -> list[WorkerView]:
        return [v for w in workers if (v := self.workers.get(w)) is not None and v.alive]

    def _notice_broken_steps(self) -> None:
        """A member that halted of itself saw a collective fail. Find who died, or re-form with the same members."""
        if self.recovering:
            return
        crew = self._alive(self.crew)
        halted = [v for v in crew if v.status.phase is Phase.HALTED and v.status.generation > self.dead]
        if not halted:
            return
        cut_off = [v for v in crew if not v.connected]
        for view in cut_off:
            self._lose(view, "its connection closed and a step broke")
        if not cut_off and self._now_s - min(v.halted_s for v in halted) >= self.timing.settle_s:
            self._break()

    def _finish_if_done(self) -> None:
        crew = [v for w in self.crew if (v := self.workers.get(w)) is not None]
        finished = [v for v in crew if v.status.phase is Phase.FINISHED]
        # A newcomer whose switch did not come before the last step waits for nothing.
        over = (Phase.FINISHED, Phase.LEFT, Phase.READY)
        if finished and all(v.status.phase in over or not v.alive for v in crew):
            self._end("finished", ev.JobFinished(max(v.status.step for v in finished)))

    def _recover(self) -> None:
        crew = self._alive(self.crew)
        over = (Phase.FINISHED, Phase.LEFT, Phase.FAILED)
        for view in crew:
            stopped = view.status.phase in (Phase.HALTED, Phase.READY) and view.status.dead >= self.dead
            if not stopped and view.status.phase not in over:
                return
        holders = [v for v in crew if v.status.phase is Phase.HALTED and not v.status.torn]
        for view in crew:
            if view.status.phase is Phase.HALTED and view.status.torn:
                self._discard(view, "the state it was given is incomplete")
        self.recovering = False
        if not holders:
            self._strand()
            return
        ends = [v.status.step for w in self.crew if (v := self.workers[w]).status.phase in over]
        resume = resume_step([(v.status.step, v.status.holds) for v in holders], ends)
        able = [
            v for v in holders if v.status.step == resume or (v.status.holds and v.status.step == resume - 1)
        ]
        for view in holders:
            if view not in able:
                self._discard(view, "it is behind the others")
        members = tuple(v.worker for v in able)
        self.crew = members
        self._issue(Kind.RECOVER, members, holders=members, resume=resume)

    def _strand(self) -> None:
        """No one holds the state any more. Those who are ready, or a new target, start from the checkpoint."""
        self.active, self.crew = None, ()

    def _tell_if_stranded(self) -> None:
        nothing = self.active is None and not self.crew and self.paused is None and not self.pausing
        stranded = nothing and bool(self.workers) and not any(v.alive for v in self.workers.values())
        if stranded and not self.stranded:
            self._emit(ev.JobStranded(self.checkpoint, "no worker is left"))
        self.stranded = stranded

    def _discard(self, view: WorkerView, why: str) -> None:
        """During a recovery: a worker that cannot be a member of what comes next."""
        view.alive, view.connected = False, False
        self.target = tuple(w for w in self.target if w != view.worker)
        self._emit(ev.WorkerLost(view.worker, why, True))
        self._effects.append(StopWorker(view.worker, kill=True, why=why))

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
            if all(v.status.formed == plan.number or v.status.generation == plan.number for v in members):
                self.pending.committed = True
                self.crew = tuple(dict.fromkeys((*self.crew, *plan.members)))
            else:
                return
        elif plan.kind in (Kind.RECOVER, Kind.FIRST) and any(v.status.broken == plan.number for v in members):
            self._break()
            return
        self._complete(plan, members)

    def _complete(self, plan: Plan, members: list[WorkerView]) -> None:
        if not all(self._arrived(v, plan.number) for v in members):
            return
        leavers = [self.workers[w] for w in plan.holders if w not in plan.members]
        if any(v.alive and v.status.phase not in (Phase.LEFT, Phase.FINISHED) for v in leavers):
            return
        for view in leavers:
            self._emit(ev.WorkerLeft(view.worker))
        # A newer target may want one of them back, too late: its process ends, a new worker must take its place.
        self.target = tuple(w for w in self.target if w not in plan.holders or w in plan.members)
        self.pending = None
        self.active = Generation(plan.number, plan.members) if plan.members else None
        self.crew = plan.members
        step = max((v.status.step for v in (*members, *leavers)), default=0)
        self.stragglers.reset()
        if plan.kind is Kind.PAUSE:
            self.paused = next((v.status.saved for v in leavers if v.status.saved), None)
            self._emit(ev.JobPaused(self.paused or "", step))
        else:
            self.paused = None
            self._emit(ev.GenerationCommitted(plan.number, plan.members, step, plan.kind))

    @staticmethod
    def _arrived(view: WorkerView, number: int) -> bool:
        status = view.status
        working = status.phase is Phase.ACTIVE and not status.torn
        return status.generation == number and (working or status.phase is Phase.FINISHED)

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
            self._issue(kind, members, holders=current)

    def _issue(self, kind: Kind, members: tuple[str, ...], holders: tuple[str, ...], resume: int = 0) -> None:
        self.issued += 1
        plan = Plan(
            number=self.issued,
            kind=kind,
            members=members,
            previous=self.active.number if self.active else 0,
            holders=holders,
            addresses={w: self.workers[w].status.address for w in members if w not in holders},
            resume=resume,
            restore=(self.paused or self.checkpoint) if kind is Kind.FIRST else None,
            save=self.pause_path if kind is Kind.PAUSE else None,
        )
        # Halted members go on as soon as a recovery group stands; and a pause needs no group.
        self.pending = Pending(plan, committed=kind in (Kind.RECOVER, Kind.PAUSE))
        if kind is Kind.FIRST:
            self.crew = members
            self.pending.committed = True

    def _stop_unwanted(self) -> None:
        for view in self.workers.values():
            unheard = view.connected and view.status.seq == 0  # it may be about to say that it trains
            if (
                view.alive
                and not view.stopping
                and not unheard
                and view.worker not in (*self.target, *self.crew)
            ):
                view.stopping = True
                self._effects.append(StopWorker(view.worker, kill=False, why="no longer wanted"))

    def _end(self, outcome: str, event: ev.JobEvent) -> None:
        if self.outcome is not None:
            return
        self.outcome, self.pending, self.recovering = outcome, None, False
        self._emit(event)
        for view in self.workers.values():
            if not view.alive or view.stopping:
                continue
            view.stopping = True
            if view.status.phase is not Phase.FINISHED:  # a script that is done may still save or evaluate
                self._effects.append(StopWorker(view.worker, kill=False, why=f"the job has {outcome}"))

    # Telling the workers

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
        mine = plan if plan is not None and view.worker in (*plan.members, *plan.holders) else None
        return Order(
            seq=0,
            dead=self.dead,
            plan=mine,
            commit=bool(mine and self.pending and self.pending.committed),
            board=self._board(mine) if mine and view.worker in mine.members else {},
            signed=view.announced,
            first=self.active is None,
            checkpoint=self.checkpoints_asked,
            stop="no longer wanted" if view.stopping else None,
        )

    def _board(self, plan: Plan) -> dict[str, str]:
        """The entries of all members, once there is one from each: one message instead of one per entry."""
        entries: dict[str, str] = {}
        for view in self._alive(plan.members):
            if view.status.board_of != plan.number or not view.status.board:
                return {}
            entries |= view.status.board
        return entries

    def _emit(self, event: ev.JobEvent) -> None:
        self._effects.append(Emit(event))

    # Memory

    def to_dict(self) -> dict[str, Any]:
        """All that a later coordinator needs to take this job's workers over. JSON-ready."""
        return {
            **{name: getattr(self, name) for name in _PLAIN},
            **{name: _listed(getattr(self, name)) for name in _TUPLES},
            "active": to_plain(self.active) if self.active else None,
            "pending": to_plain(self.pending) if self.pending else None,
            "workers": {
                v.worker: {name: getattr(v, name) for name in _REMEMBERED} for v in self.workers.values()
            },
        }

    @classmethod
    def from_dict(cls, saved: dict[str, Any], now_s: float, timing: Timing | None = None) -> JobCoordinator:
        """As it was. Its workers have `reconnect_s` from now to say that they are still there."""
        new = cls(saved["job"], timing, saved["pause_path"])
        for name in _PLAIN:
            setattr(new, name, saved[name])
        for name in _TUPLES:
            setattr(new, name, None if saved[name] is None else tuple(saved[name]))
        new.active = from_plain(Generation, saved["active"]) if saved["active"] else None
        new.pending = from_plain(Pending, saved["pending"]) if saved["pending"] else None
        for worker, raw in saved["workers"].items():
            new.workers[worker] = WorkerView(worker, since_s=now_s, heard_s=now_s, **raw)
        return new


_PLAIN = (
    *("job", "pause_path", "pausing", "recovering", "dead", "issued"),
    *("checkpoint", "checkpoint_step", "checkpoints_asked", "paused", "outcome", "stranded"),
)
_TUPLES = ("target", "crew", "signature")
_REMEMBERED = ("alive", "stopping", "announced", "met")


def _listed(values: tuple[str, ...] | None) -> list[str] | None:
    return None if values is None else list(values)
