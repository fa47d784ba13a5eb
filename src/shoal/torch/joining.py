"""How a worker comes into a generation: the first one, a switch, or the one that replaces a broken one."""

from __future__ import annotations

import pickle
import time
from dataclasses import replace
from pathlib import Path

import torch
from shoal.torch.core import StepKind
from shoal.torch.handing import Handing
from shoal.torch.order import Position
from shoal.torch.worker import Groups
from shoal.wire.messages import Kind, Plan


class Joining(Handing):
    def _should_rehearse(self) -> bool:
        if self._joined or self._worker is None or not self._rehearse or self._loader is None:
            return False
        member = self._worker.member
        self._worker.wait_for(lambda: member.first is not None)
        return not member.first

    def _signature(self) -> tuple[str, ...]:
        return *self._state().signature(), *(self._loader.lines() if self._loader is not None else ())

    def _join(self) -> None:
        """Wait to be taken into a generation, and take the state over."""
        if self._joined:
            self._resume_alone()
            return
        worker = self._worker
        assert worker is not None
        self._state().describe({}, whole=False)  # what cannot travel is told now, not when it must
        with worker.lock:
            worker.member.ready(self._signature(), worker.receiver.address)
        worker.link.say()
        plan = self._await_place()
        self._joined, self._retreated = True, False
        if plan.kind is Kind.FIRST:
            self._begin_first(plan)
        else:
            self._begin_switch(plan)

    def _resume_alone(self) -> None:
        """A single process outside Shoal: go on from the checkpoint if there is one."""
        fresh = self._worker is None and self.position == Position()
        if fresh and self.checkpoint_path and Path(self.checkpoint_path).exists():
            self._load(self.checkpoint_path)

    def _await_place(self) -> Plan:
        """The plan to enter. Before that, once a plan is sure to come: look on in its first step."""
        worker = self._worker
        assert worker is not None
        while True:
            plan: Plan = worker.wait_for(lambda: worker.entering or self._offer() or self._to_come())
            if plan is worker.entering or self._offer() is plan:
                return plan
            with worker.lock:
                groups = worker.formed(plan.number)
                if groups is not None:
                    self._look_on(groups, plan.number)

    def _to_come(self) -> Plan | None:
        """A plan that is committed and whose group stands: its members switch at a coming boundary."""
        assert self._worker is not None
        member = self._worker.member
        plan = member.plan
        if plan is None or plan.kind is not Kind.SWITCH or not member.committed:
            return None
        return plan if member.formed == plan.number and self._looking_on != plan.number else None

    def _offer(self) -> Plan | None:
        """The plan whose holders have switched and begun to send."""
        worker = self._worker
        assert worker is not None
        plan = worker.member.plan
        if plan is None or plan.kind is not Kind.SWITCH or worker.member.formed != plan.number:
            return None
        incoming = worker.receiver.get(plan.number)
        return plan if incoming is not None and incoming.offered is not None else None

    def _begin_first(self, plan: Plan) -> None:
        worker = self._worker
        assert worker is not None
        if self._looking is not None and self._buckets is not None:  # on in a plan that came to nothing
            self._buckets.renew()
            self._vote, self._looking = torch.zeros_like(self._vote), None
        with worker.lock:
            worker.entering, worker.interrupted = None, False
            worker.member.enter(plan)
            self._use(worker.take(plan.number), plan.members, plan.members)
        self._final = True
        if plan.members[0] == worker.name:
            if plan.restore:
                self._load(plan.restore)
                worker.member.done = self.position.step
            self._resized()
            self._keep_stats()
            self._send(plan)
        else:
            incoming = worker.receiver.get(plan.number)
            worker.wait_for(
                lambda: worker.interrupted or (incoming and (incoming.broken or incoming.offered is not None))
            )
            step = incoming.offered if incoming is not None else None
            if incoming is not None and step is not None:
                self._open_gate(incoming, step)
            if incoming is not None and step is not None and self._take_window(incoming, step):
                self._resized()
                self._keep_stats()
            else:
                self._halt(holds=False)
                if not self._joined:
                    self._join()
        worker.link.say()

    def _begin_switch(self, plan: Plan) -> None:
        """The holders compute; this worker looks on, step by step, until it has been given the whole state."""
        worker = self._worker
        assert worker is not None
        with worker.lock:
            incoming = worker.receiver.get(plan.number)
            step = incoming.offered if incoming is not None else None
            if incoming is None or step is None or worker.member.plan is not plan:
                self._joined = False
                self._join()  # dropped at the last moment
                return
            description = incoming.description(step)
            assert description is not None
            facts = pickle.loads(description)
            worker.member.joined(plan, step)
            self._use(worker.take(plan.number), plan.members, plan.holders)
            self.position = replace(facts["position"])
            self._catching_up, self._final = incoming, incoming.is_final(step)
            self._window_step = step
        self._state().adopt(facts)
        if self._looking_on != plan.number:
            assert self._groups is not None
            self._look_on(self._groups, plan.number)
        self._open_gate(incoming, step)  # only now: looking on anew may have changed the buckets' memory
        if self._loader is not None:
            self._take_rule(facts)
            self._loader.changed()
        worker.link.say()

    def _use(self, groups: Groups, members: tuple[str, ...], contributors: tuple[str, ...]) -> None:
        old, self._groups = self._groups, groups
        self._contributors = tuple(i for i, m in enumerate(members) if m in contributors)
        self._next_contributors = tuple(range(len(members)))
        self._check_next, self._check_after = self._checked and len(members) > 1, -1
        assert self._worker is not None
        self._worker.retire(self._former)
        self._former = old if self._relays else None
        if self._former is None:
            self._worker.retire(old)

    def _keep_stats(self) -> None:
        if self._buckets is not None:
            self._buckets.keep_stats()

    def _resized(self) -> None:
        if self._loader is not None:
            note = self._loader.rule.resize(len(self._contributors), self.position.step)
            if note:
                self._note(note)
            self._loader.changed()

    def _halt(self, holds: bool) -> None:
        """This generation is broken. Say how far this worker came, and go on in the one that replaces it."""
        worker, step = self._worker, self._step
        assert worker is not None
        began_s = time.perf_counter()
        self._vote = torch.zeros_like(self._vote)  # that of a broken one may still be written into
        if step is not None:
            step.undo = pickle.dumps((self.state.capture(), self._state().groups()))
        with worker.lock:
            worker.interrupted = False
            worker.member.halt(holds)
        worker.link.say()
        if worker.member.partial:
            self._retreat()
            return
        plan = worker.wait_for(lambda: worker.entering)
        with worker.lock:
            worker.entering, worker.interrupted = None, False
            apply = worker.member.enter(plan)
            self._use(worker.take(plan.number), plan.members, plan.members)
        self._check_after = plan.resume  # some have halted at a boundary, others within a step
        worker.link.say()
        self._catching_up, self._looking, self._final = None, None, False
        if step is not None and apply:
            assert self._buckets is not None
            self._buckets.install()
            step.synced = step.counted = step.resized = True
            step.kind = StepKind.REAL
        elif step is not None:
            step.kind = StepKind.VOID
        if self._buckets is not None and not apply:
            self._buckets.renew()
            self._buckets.restore_stats()
        if step is None or not step.resized:
            self._resized()
        self.meter.pauses.append((plan.number, time.perf_counter() - began_s))

    def _retreat(self) -> None:
        """This worker had only a part of the state. What is left of the loop's body is void, then it joins anew."""
        worker = self._worker
        assert worker is not None
        worker.wait_for(lambda: worker.member.aborted)
        with worker.lock:
            worker.interrupted = False
            worker.receiver.forget(worker.member.generation)
            worker.member.retreat()
        worker.retire(self._groups)
        self._groups, self._joined, self._retreated = None, False, True
        self._contributors = self._next_contributors = (0,)
        self._catching_up, self._looking, self._looking_on, self._final = None, None, 0, False
        if self._step is not None:
            self._step.kind = StepKind.VOID
        if self._buckets is not None:
            self._buckets.renew()
        worker.link.say()
