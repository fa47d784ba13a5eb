"""Life and death of a job's workers, and how the survivors go on."""

from __future__ import annotations

from shoal.wire import events as ev
from shoal.wire.events import StopWorker
from shoal.wire.messages import Kind, Phase
from shoal.wire.planning import Planning
from shoal.wire.views import WorkerView, resume_step


class Losses(Planning):
    def _check_life(self, view: WorkerView) -> None:
        silent_s = self._now_s - view.heard_s
        status, timing = view.status, self.timing
        limit_s = timing.away_timeout_s if status.away else timing.heartbeat_timeout_s
        if view.connected and silent_s > limit_s:
            self._lose(view, f"no sign of life for {silent_s:.1f} s")
        elif not view.connected and view.met and silent_s > timing.reconnect_s:
            self._lose(view, "its connection closed")
        elif status.phase is Phase.STARTING and self._now_s - view.since_s > timing.start_s:
            self._lose(view, f"not ready after {timing.start_s:.0f} s")
        elif status.phase is Phase.ACTIVE and not self.recovering and self._hangs(view):
            self._lose(view, f"did not arrive at step {view.arrived + 1} where the others wait")

    def _hangs(self, view: WorkerView) -> bool:
        """Others wait for it at a step where it has not arrived for a long time.

        Rank 0 may evaluate or save for minutes between two steps; that is no reason to end it.
        """
        peers = [
            p
            for w in view.status.members
            if (p := self.workers.get(w)) and p.alive and p.status.generation == view.status.generation
        ]
        ahead = [p.arrived_s for p in peers if p.arrived > view.arrived]
        limit_s = self.timing.away_s if view.status.away else self.timing.hang_s
        return bool(ahead) and self._now_s - max(*ahead, view.arrived_s) > limit_s

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

    def _recover(self) -> None:
        crew = self._alive(self.crew)
        over = (Phase.FINISHED, Phase.LEFT, Phase.FAILED)
        for view in crew:
            stopped = view.status.phase in (Phase.HALTED, Phase.READY) and view.status.dead >= self.dead
            if not stopped and view.status.phase not in over:
                return
        holders = [v for v in crew if v.status.phase is Phase.HALTED and not v.status.torn]
        # Who had only a part of the state waits to be given it again.
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
