"""The coordinator of one job: which workers it shall have, and how it gets there. Pure: no I/O, no clock.

Every input (`set_target`, `received`, `exited`, `tick`, ...) returns effects. After each, `_advance` looks at the
whole state and does what is next, so a repeated or late input does no harm. Per job there is an `active`
generation and at most one `pending` one:

    newcomers and leavers    first the union of both (newcomers look on while they are given the state), then the
                             switch without the leavers, whose group forms meanwhile
    newer target             an uncommitted plan is replaced at once; a committed one is a step or two from the
                             switch; who is still being given the state then and is not wanted any more leaves
    a member lost            everything issued so far is declared dead, survivors halt and say how far they came,
                             a recovery generation goes on from the last completed step
    no one left              the next target starts from the last checkpoint
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shoal.wire import events as ev
from shoal.wire.events import Effect, Send, StartWorker, StopWorker
from shoal.wire.losses import Losses
from shoal.wire.messages import Order, Phase, Report, Status
from shoal.wire.views import Generation, Timing, WorkerView, first_difference

__all__ = ["Generation", "JobCoordinator", "Timing", "WorkerView"]


class JobCoordinator(Losses):
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
            effects, self._effects = self._effects, []
            return effects  # it changes nothing that is planned or told
        if message.seq > view.status.seq:
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
        # Who has not been given the whole state (or has lost it again) is not needed: the others go on without it.
        member = self.active is not None and view.worker in self.active.members
        holds = not view.status.torn and view.worker in view.status.members
        if self.active is not None and not (member and holds):
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
                self._announce()
                self._plan_next()
                self._tell_if_stranded()
            self._stop_unwanted()
        self._dispatch()
        effects, self._effects = self._effects, []
        return effects

    def _finish_if_done(self) -> None:
        crew = [v for w in self.crew if (v := self.workers.get(w)) is not None]
        finished = [v for v in crew if v.status.phase is Phase.FINISHED]
        # A newcomer whose switch did not come before the last step waits for nothing.
        over = (Phase.FINISHED, Phase.LEFT, Phase.READY)
        if finished and all(v.status.phase in over or not v.alive for v in crew):
            self._end("finished", ev.JobFinished(max(v.status.step for v in finished)))

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
                self._effects.append(StopWorker(view.worker, kill=False, why=view.why))

    def _end(self, outcome: str, event: ev.JobEvent) -> None:
        if self.outcome is not None:
            return
        self.outcome, self.pending, self.recovering = outcome, None, False
        self._emit(event)
        for view in self.workers.values():
            if not view.alive or view.stopping:
                continue
            view.stopping, view.why = True, f"the job has {outcome}"
            if view.status.phase is not Phase.FINISHED:  # a script that is done may still save or evaluate
                self._effects.append(StopWorker(view.worker, kill=False, why=view.why))
