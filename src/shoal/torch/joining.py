"""How a worker comes into a generation: the first one, a switch, or the one that replaces a broken one."""

from __future__ import annotations

import copy
import pickle
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from shoal.torch.core import JobCore, StepKind
from shoal.torch.gradients import parameter_lines
from shoal.torch.order import Position
from shoal.torch.state import random_state, seed_all, set_random_state
from shoal.torch.transfer import Incoming
from shoal.torch.worker import Groups
from shoal.wire.messages import Kind, Plan


class Joining(JobCore):
    def _look_on(self) -> None:
        raise NotImplementedError

    def _should_rehearse(self) -> bool:
        if self._joined or self._worker is None or not self._rehearse or self._loader is None:
            return False
        member = self._worker.member
        self._worker.wait_for(lambda: member.first is not None)
        return not member.first

    def _signature(self) -> tuple[str, ...]:
        state = self._state()
        optimizer = state.optimizer
        lines = parameter_lines(list(state.model.named_parameters()), "parameter")
        lines += parameter_lines(list(state.model.named_buffers()), "buffer")
        sizes = [len(g["params"]) for g in optimizer.param_groups]
        lines.append(f"optimizer {type(optimizer).__name__} with groups of {sizes} parameters")
        return (*lines, *(self._loader.lines() if self._loader is not None else []))

    def _join(self) -> None:
        """Wait to be taken into a generation, and take the state over."""
        if self._joined:
            self._resume_alone()
            return
        worker = self._worker
        assert worker is not None
        with worker.lock:
            worker.member.ready(self._signature(), worker.receiver.address)
        worker.link.say()
        plan = worker.wait_for(lambda: worker.entering or self._offer())
        self._joined = True
        if plan.kind is Kind.FIRST:
            self._begin_first(plan)
        else:
            self._begin_switch(plan)

    def _resume_alone(self) -> None:
        """A single process outside Shoal: go on from the checkpoint if there is one."""
        fresh = self._worker is None and self.position == Position()
        if fresh and self.checkpoint_path and Path(self.checkpoint_path).exists():
            self._load(self.checkpoint_path)

    def _offer(self) -> Plan | None:
        """The plan whose holders have switched and begun to send."""
        worker = self._worker
        assert worker is not None
        plan = worker.member.plan
        if plan is None or plan.kind is not Kind.SWITCH or worker.member.formed != plan.number:
            return None
        incoming = worker.receiver.get(plan.number)
        ready = incoming is not None and any("description" in h for h in incoming.heads.values())
        return plan if ready else None

    def _begin_first(self, plan: Plan) -> None:
        worker = self._worker
        assert worker is not None
        with worker.lock:
            worker.entering, worker.interrupted = None, False
            worker.member.enter(plan)
            self._use(worker.take(plan.number), plan.members, plan.members)
        if plan.members[0] == worker.name:
            if plan.restore:
                self._load(plan.restore)
                worker.member.done = self.position.step
            self._resized()
            self._send(plan)
        else:
            incoming = worker.receiver.get(plan.number)
            found = worker.wait_for(
                lambda: worker.interrupted or (incoming and (incoming.broken or self._description(incoming)))
            )
            if isinstance(found, bytes) and incoming is not None and self._receive(plan, incoming):
                self._resized()
            else:
                self._halt(holds=False)
        worker.link.say()

    @staticmethod
    def _description(incoming: Incoming) -> bytes | None:
        return next((h["description"] for h in incoming.heads.values() if "description" in h), None)

    def _begin_switch(self, plan: Plan) -> None:
        """The holders compute the coming step; this worker looks on and receives the state meanwhile."""
        worker = self._worker
        assert worker is not None
        with worker.lock:
            incoming = worker.receiver.get(plan.number)
            if incoming is None or worker.member.plan is not plan:
                self._joined = False
                self._join()  # dropped at the last moment
                return
            description = self._description(incoming)
            assert description is not None
            facts = pickle.loads(description)
            worker.member.joined(plan, facts["position"].step)
            self._use(worker.take(plan.number), plan.members, plan.holders)
            self.position = replace(facts["position"])
            self._catching_up = (plan, incoming)
        assert self._buckets is not None
        assert self._groups is not None
        self._buckets.look_on(self._groups.data, self.sync)
        self._looking_on = threading.Thread(target=self._look_on, name="shoal-look-on", daemon=True)
        self._looking_on.start()
        if self._loader is not None:
            self._take_rule(facts)
            self._loader.changed()
        worker.link.say()

    def _use(self, groups: Groups, members: tuple[str, ...], contributors: tuple[str, ...]) -> None:
        old, self._groups = self._groups, groups
        self._contributors = tuple(i for i, m in enumerate(members) if m in contributors)
        self._next_contributors = tuple(range(len(members)))
        self._check_next = self._checked and len(members) > 1
        if self._worker is not None:
            self._worker.retire(old)

    def _resized(self) -> None:
        if self._loader is not None:
            note = self._loader.rule.resize(len(self._contributors), self.position.step)
            if note:
                self._note(note)
            self._loader.changed()

    def _send(self, plan: Plan) -> None:
        """Start the transfer to the newcomers; the optimizer waits for its end."""
        groups, worker = self._groups, self._worker
        assert groups is not None
        assert worker is not None
        if groups.links:
            random = random_state(worker.cuda)
            capture = self._state().capture(self._facts(random=False))
            for link in groups.links:
                link.start(plan, worker.name, self.position.step, random, capture)

    def _finish_sending(self) -> None:
        if self._groups is None or not self._groups.links:
            return
        began_s = time.perf_counter()
        for link in self._groups.links:
            while link.thread is not None and link.thread.is_alive():
                link.thread.join(0.05)
                if self._worker is not None and self._worker.interrupted:
                    link.close()
        self._groups.links.clear()
        self._pause_s += time.perf_counter() - began_s

    def _receive(self, plan: Plan, incoming: Incoming) -> bool:
        """Receive the state in place; False if it did not come whole."""
        worker = self._worker
        assert worker is not None
        with worker.lock:
            description = self._description(incoming)
            assert description is not None
            facts, homes = self._state().targets(description)
            worker.receiver.open_gate(incoming, facts, homes)
            worker.wait_for(
                lambda: (
                    incoming.broken or worker.interrupted or len(incoming.finished) == len(incoming.sources)
                )
            )
            if len(incoming.finished) < len(incoming.sources):
                return False
        self._adopt(facts, plan, incoming)
        with worker.lock:
            worker.member.state_complete(self.position.step)
        return True

    def _adopt(self, facts: dict[str, Any], plan: Plan, incoming: Incoming) -> None:
        self._state().adopt(facts)
        self.position = replace(facts["position"])
        self._take_rule(facts)
        # The random state of whoever had this rank before; where there was no one, one of its own.
        before = [h["random"] for h in incoming.heads.values() if h["rank"] == self.rank]
        if before and plan.holders:
            set_random_state(before[0])
        else:
            seed_all(hash((facts["seed"], self.position.step, self.rank)))

    def _halt(self, holds: bool) -> None:
        """This generation is broken. Say how far this worker came, and go on in the one that replaces it."""
        worker, step = self._worker, self._step
        assert worker is not None
        began_s = time.perf_counter()
        if step is not None:
            step.undo = pickle.dumps(copy.deepcopy(self.state.capture()))
        with worker.lock:
            worker.interrupted = False
            worker.member.halt(holds)
        worker.link.say()
        plan = worker.wait_for(lambda: worker.entering)
        with worker.lock:
            worker.entering, worker.interrupted = None, False
            apply = worker.member.enter(plan)
            self._use(worker.take(plan.number), plan.members, plan.members)
        worker.link.say()
        self._catching_up = None
        if step is not None and apply:
            assert self._buckets is not None
            self._buckets.install()
            step.synced = step.counted = True
            step.kind = StepKind.REAL
        elif step is not None:
            step.kind = StepKind.VOID
        if self._buckets is not None and not apply:
            self._buckets.renew()
            self._buckets.restore_stats()
        self._resized()
        self.meter.pauses.append((plan.number, time.perf_counter() - began_s))
