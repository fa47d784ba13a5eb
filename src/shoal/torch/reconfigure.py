"""How the parts of a job follow a change of generation: join, switch, recover, retreat, finish.

The `Session` says which generation this worker is in. A `Reconfiguration` calls the parts in the order that each
change requires. It has no state of its own. The protocol is described in docs/design/010-reconfigure.md.
"""

from __future__ import annotations

import time

from shoal.torch.checked import StateCheck
from shoal.torch.checkpoint import Checkpoints
from shoal.torch.data_order import DataOrder
from shoal.torch.handover import Handover
from shoal.torch.meeting import Meeting
from shoal.torch.meter import Meter
from shoal.torch.replica import Replica
from shoal.torch.session import Session
from shoal.torch.step import Steps
from shoal.torch.step_state import Step
from shoal.torch.vote import Vote
from shoal.wire.messages import Kind, Plan


class Reconfiguration:
    def __init__(
        self,
        session: Session,
        replica: Replica,
        order: DataOrder,
        handover: Handover,
        vote: Vote,
        steps: Steps,
        checkpoints: Checkpoints,
        check: StateCheck,
        meeting: Meeting,
        meter: Meter,
    ) -> None:
        self._session, self._replica, self._order = session, replica, order
        self._handover, self._vote, self._steps = handover, vote, steps
        self._checkpoints, self._check, self._meeting, self._meter = checkpoints, check, meeting, meter

    # Into a generation

    def join(self) -> None:
        """Wait for a place in a generation, and receive the state."""
        session = self._session
        if session.outside_shoal:
            self._checkpoints.load_if_new()
        if session.joined:
            return
        self._replica.state.describe({}, whole=False)  # what cannot be pickled is an error now, not later
        session.announce((*self._replica.state.signature(), *self._order.signature()))
        while not session.joined:
            plan = self._await_place()
            if plan.kind is Kind.FIRST:
                self._begin_first(plan)
            else:
                self._begin_as_newcomer(plan)

    def _await_place(self) -> Plan:
        """The plan to enter. Before that, once a plan is committed: vote in its first step."""
        if self._replica.shard_set is not None:
            return self._session.next_entry()
        while True:
            place = self._session.next_place(self._vote.early_generation, self._replica.several)
            if not place.committed:
                return place.plan
            with self._session.lock:
                groups = self._session.formed(place.plan)
                if groups is not None:
                    self._steps.observe(groups.data, groups.vote, place.plan.number)

    def _begin_first(self, plan: Plan) -> None:
        """The first generation: rank 0 has the state, from its script or a checkpoint."""
        session = self._session
        self._steps.stop_observing()
        if session.enter(plan) is None:
            return  # the plan was dropped at the last moment
        self._check.expect()
        sharded = self._replica.sharded
        gives_its_own = sharded is not None or plan.members[0] == session.name
        if gives_its_own and not plan.restore and self._steps.altered:
            # All holders of the state were lost, and the job begins again: not with the traces of a rehearsal.
            session.be_replaced("it has rehearsed, and the job begins again without a checkpoint")
        if plan.members[0] == session.name:
            if plan.restore:
                self._checkpoints.load(plan.restore)
                session.restored(self._order.position.step)
            self._begin_training()
            begun = True
            if sharded is None:
                self._handover.send_first(plan)
            else:
                begun = sharded.begin_first(plan)
        else:
            begun = self._handover.receive_first(plan) if sharded is None else sharded.begin_first(plan)
            if begun:
                self._begin_training()
        if not begun:
            self.halt(holds=False)
        session.notify()

    def _begin_training(self) -> None:
        self._order.resized()
        self._replica.keep_stats()

    def _begin_as_newcomer(self, plan: Plan) -> None:
        """The holders train. This worker catches up step by step until it has the whole state."""
        session, handover = self._session, self._handover
        incoming = session.join(plan, at_once=self._replica.several)
        if incoming is None:
            return  # the plan was dropped at the last moment
        self._steps.altered = True
        self._check.expect()
        self._meeting.begin_as_newcomer()
        if self._replica.shard_set is not None:
            self._resharded(self._replica.shard_set.join(plan, incoming))
            self._replica.mute(True)  # until its first batch: the others are in steps, and do not evaluate
            return
        if self._replica.several:
            if handover.receive_first(plan):
                self._begin_training()
                self._check.expect(after=session.done)  # the others have switched at this boundary
            else:
                self.halt(holds=False)
            session.notify()
            return
        if self._replica.shard_groups is not None:
            self._replica.shard_groups.place(plan)
        handover.begin_receiving(incoming)
        if self._vote.early_generation != plan.number:
            self._steps.observe(session.data_group, session.vote_group, plan.number)
        handover.open_gate()  # only now: observing may have changed the buckets' memory
        self._order.replan(self._following())
        session.notify()

    def _following(self) -> tuple[int, ...]:
        """The contributors after the present step."""
        session = self._session
        return session.next_contributors if self._handover.final else session.contributors

    # From one generation to the next

    def step_done(self, step: Step) -> None:
        """A step counts: newcomers that have received everything in it get their part from the next one on."""
        session, handover = self._session, self._handover
        if step.resized:
            self._order.resized()
        if session.outside_shoal:
            return
        if not step.counted:
            session.applied()
        session.decide_alone(handover.plan_window)
        if handover.complete():
            session.newcomers_complete()
            self._order.resized()
            self._meter.pauses.append((session.generation, handover.pause_s))
            session.notify()
        if not session.growing:
            handover.end()

    def boundary(self) -> None:
        """Between two steps, when another one follows: the only place where members change."""
        session = self._session
        if session.outside_shoal:
            return
        if not self._replica.is_broken:
            self._check.run_if_due()
        shard_set = self._replica.shard_set
        broken = session.interrupted or self._replica.is_broken
        if broken or (shard_set is not None and not shard_set.copy_if_due()):
            self.halt(holds=False)
            if not session.joined:
                return
        if session.agreed and self._steps.stepped:
            self._switch()
        elif self._handover.window_due:
            self._handover.next_window()
            if self._handover.final:
                self._order.replan(self._following())

    def _switch(self) -> None:
        session, handover, began_s = self._session, self._handover, time.perf_counter()
        shard_set, sharded = self._replica.shard_set, self._replica.sharded
        coming = session.agreed_plan()
        if sharded is not None:
            if coming is not None and coming.kind is Kind.PAUSE:
                self._checkpoints.save_sharded_for_pause(coming)
            elif coming is not None and not coming.newcomers and not sharded.release(coming):
                self.halt(holds=False)
                return
        elif pause := session.pause_to_save():
            # Before anyone learns that this worker has left: the job resumes from what it reports.
            session.saved(self._checkpoints.save_for_pause(pause.save))
        plan = session.switch(at_once=self._replica.several)
        if plan is None:
            return
        if session.name not in plan.members:
            session.leave()
        self._replica.keep_stats()
        self._check.expect()
        if self._replica.shard_groups is not None:
            self._replica.shard_groups.entered(plan)
        if shard_set is not None:
            self._resharded(shard_set.admit(plan) if plan.newcomers else shard_set.released())
            self._meter.pauses.append((session.generation, time.perf_counter() - began_s))
            return
        if plan.newcomers and not self._replica.several:
            handover.begin_sending(plan)
            self._order.replan(self._following())
        else:
            self._order.resized()
            if plan.newcomers:
                handover.send_first(plan)
            self._meter.pauses.append((plan.number, time.perf_counter() - began_s))
        handover.pause_s = time.perf_counter() - began_s
        session.notify()

    def _resharded(self, done: bool) -> None:
        """The rows of a sharded set have moved to the members of the new generation, or that broke."""
        session = self._session
        if not done:
            self.halt(holds=False)
            return
        if session.growing:
            session.newcomers_complete()
        # A newcomer comes to a boundary before its first step, the others do not.
        self._check.expect(after=self._order.position.step)
        self._order.resized()
        session.notify()

    def halt(self, holds: bool, in_backward: bool = True) -> None:
        """The generation broke. Report how far this worker got, and continue in the generation that replaces it.

        `holds`: this worker has the complete gradients of the present step. `in_backward`: it broke at the end of a
        backward pass, not in an exchange of the script.
        """
        session, began_s = self._session, time.perf_counter()
        if session.finished:
            raise RuntimeError(
                "a worker has ended, or was lost, while another one needs it after the last epoch, in job.evaluate or "
                "job.mean, for example: call these on every worker, not within `if job.is_main`. If a worker that is "
                "lost must do no harm, call them within job.epochs"
            )
        self._steps.broke()
        session.halt(holds)
        if session.partial:
            self._retreat()
            return
        plan, apply = session.recover()
        self._check.expect(after=plan.resume)  # some members halted at a boundary, others within a step
        groups = self._replica.shard_groups
        if groups is not None and not groups.recover(plan):  # another worker was lost meanwhile
            self.halt(holds=holds and apply, in_backward=in_backward)
            return
        if self._replica.shard_set is not None:
            recovered = self._replica.shard_set.recover(plan, self._checkpoints.load)
            if recovered is None:  # another worker was lost meanwhile
                self.halt(holds=holds and apply, in_backward=in_backward)
                return
            if not recovered:
                self._check.expect(after=self._order.position.step)
                self._steps.returned()
                self._order.resized()
                if not self._meeting.align():
                    self.halt(holds=False, in_backward=False)
                    return
                self._meter.pauses.append((plan.number, time.perf_counter() - began_s))
                session.notify()
                return
        session.notify()
        self._handover.end()
        if self._steps.recover(apply, in_backward):
            self._order.resized()
        if not self._meeting.align():
            self.halt(holds=False, in_backward=False)  # what it held is applied
            return
        self._meter.pauses.append((plan.number, time.perf_counter() - began_s))

    def _retreat(self) -> None:
        """This worker had only part of the state: it joins again."""
        self._session.retreat()
        self._handover.end()
        self._steps.retreat()
        self._session.notify()

    # Out of the last one

    def finish(self, stopped: str | None = None) -> None:
        """The script is done. `stopped`: where, if it ended before its last epoch."""
        if self._session.outside_shoal:
            return
        if self._handover.catching_up:
            self._session.give_up()
        self._session.finish(stopped)
