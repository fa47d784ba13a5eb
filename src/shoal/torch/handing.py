"""State from the holders to newcomers, window by window: what the training threads of both sides do for it."""

from __future__ import annotations

import pickle
import time
from dataclasses import replace
from typing import Any

import torch
from shoal.torch.core import JobCore
from shoal.torch.receiving import Incoming
from shoal.torch.state import random_state, seed_all, set_random_state
from shoal.torch.transfer import Window
from shoal.torch.vote import ballot
from shoal.torch.worker import Groups
from shoal.wire.messages import Plan


class Handing(JobCore):
    # The holder's side

    def _rest_fits(self, flag: int) -> bool:
        """For the vote: whether one window is enough for what this worker has still to send."""
        worker, groups = self._worker, self._groups
        if worker is None or self._catching_up is not None:
            return False
        state, plan = self._state(), worker.member.plan
        if flag and plan is not None and plan.newcomers and (coming := worker.formed(flag)) is not None:
            for link in coming.links:
                link.load(plan, worker.name, state)
            return not state.divisible or all(link.nearly_done for link in coming.links)
        return not self._growing or groups is None or all(link.nearly_done for link in groups.links)

    @property
    def _relays(self) -> bool:
        """While newcomers look on, the holders add gradients up among themselves and hand them the sums.

        Not on GPUs: there newcomers take part with zeros, for the sums would have to come through the host.
        """
        return self._growing and self._worker is not None and not self._worker.cuda

    def _send(self, plan: Plan) -> None:
        """Begin to hand the state to the newcomers of a plan. Without holders, rank 0 is the only one."""
        groups, worker = self._groups, self._worker
        assert groups is not None
        assert worker is not None
        for link in groups.links:
            link.load(plan, worker.name, self._state())
        self._open_windows(first=True)

    def _open_windows(self, first: bool = False) -> None:
        """From here to the next optimizer step the state does not change."""
        self._window_step = self.position.step
        if self._catching_up is not None:
            self._open_gate(self._catching_up, self.position.step)
        links = self._groups.links if self._groups is not None else []
        # In a first generation all is told at once: the others wait for it before their first step.
        at_once = self._final and not self._growing
        head = {}
        if first and any(link.index == 0 for link in links):
            head["description"] = self._state().describe(self._facts(random=False), whole=at_once)
        sums = len(self._buckets.buckets) if self._relays and self._buckets is not None else 0
        for link in links:
            link.open_window(Window(self.position.step, self._final, head if link.index == 0 else {}, sums))
            if at_once:
                link.tell(self.position.step, {})

    def _tell_rest(self) -> None:
        """In the final window: all else, as it stands at the end of backward.

        There the newcomer takes it over. So what the script and the model did in this step so far (buffers, random
        numbers, what was counted in `job.state`) is in it, and what they do from here on both do.
        """
        links, worker, buckets = self._groups.links if self._groups else [], self._worker, self._buckets
        if not links:
            return
        assert worker is not None
        assert buckets is not None
        began_s = time.perf_counter()
        end: dict[str, Any] = {"random": (worker.name, random_state(worker.cuda))}
        told = {}
        if any(link.index == 0 for link in links):
            facts = {**self._facts(random=False), "good": buckets.good_on_host}
            told["description"] = self._state().describe(facts)
        for link in links:
            link.tell(self._window_step, {**end, **told} if link.index == 0 else end)
        self._pause_s += time.perf_counter() - began_s

    def _wait_read(self) -> None:
        """At the end of backward: from here on the script may change parameters, as its optimizer will."""
        began_s = time.perf_counter()
        for link in self._groups.links if self._groups is not None else []:
            link.wait_read(self._window_step, self._interrupted)
        self._pause_s += time.perf_counter() - began_s

    def _interrupted(self) -> bool:
        return self._worker is not None and self._worker.interrupted

    def _close_windows(self, stepping: bool) -> None:
        """Before the optimizer changes the state: wait for what is being sent."""
        links = self._groups.links if self._groups is not None else []
        if not links:
            return
        began_s = time.perf_counter()
        end = {"groups": self._state().groups()} if stepping else {}
        for link in links:
            link.hold()
        for link in links:
            link.close_window(self._window_step, end, self._interrupted)
        if self._final:
            links.clear()
        self._pause_s += time.perf_counter() - began_s

    # The newcomer's side

    def _open_gate(self, incoming: Incoming, step: int) -> None:
        """From here on what is sent in this window may be written here: state and sums."""
        worker, buckets = self._worker, self._buckets
        assert worker is not None
        assert buckets is not None
        if self._relays:
            buckets.let_go()
        worker.receiver.open_gate(incoming, self._state(), step, [b.flat for b in buckets.buckets])

    def _look_on(self, groups: Groups, generation: int) -> None:
        """Take part in a step with nothing: in the vote that ends it, at once (and on GPUs with zeros in the sums).

        So no one waits for this worker: neither for its run through the script nor for what is sent to it.
        """
        worker, buckets = self._worker, self._buckets
        assert worker is not None
        assert buckets is not None
        if self._looking is not None:
            buckets.renew()  # that of a plan that was dropped may still write into its memory
        flag = worker.member.flag()
        if worker.cuda:
            buckets.look_on(groups.data, self.sync)
        self._vote = torch.tensor([ballot(flag, fits=False)])
        self._looking = groups.vote.allreduce([self._vote])
        self._looking_on, self._looked_flag = generation, flag

    def _take_window(self, incoming: Incoming, step: int) -> bool:
        """Wait for the end of a window and take what came in it; False if it did not come whole."""
        worker, state = self._worker, self._state()
        assert worker is not None
        with worker.lock:
            worker.wait_for(lambda: incoming.broken or worker.interrupted or incoming.has_ended(step))
            if incoming.failure is not None:
                raise RuntimeError(f"the state could not be taken over here: {incoming.failure!r}")
            if not incoming.has_ended(step):
                return False
            received = incoming.take(step)
        state.install(received)
        if not incoming.is_final(step):
            return True
        description = incoming.description(step)
        whole = all(incoming.have.get(i) == p.numel() for i, p in enumerate(state.parameters))
        if description is None or not whole:
            self._note("the state came incomplete")
            return False
        self._adopt(pickle.loads(description), incoming, step)
        worker.receiver.finished(incoming.plan.number)
        with worker.lock:
            worker.member.state_complete(self.position.step)
        return True

    def _adopt(self, facts: dict[str, Any], incoming: Incoming, step: int) -> None:
        self._state().adopt(facts)
        self.position = replace(facts["position"])
        self._take_rule(facts)
        if self._buckets is not None:
            self._buckets.good = facts.get("good")
        # The random state of whoever's place this worker takes; where there was no one, one of its own.
        assert self._worker is not None
        before = incoming.plan.replaces.get(self._worker.name)
        states = dict(h["random"] for h in incoming.ends.get(step, {}).values() if "random" in h)
        if before in states:
            set_random_state(states[before])
        else:
            seed_all(hash((facts["seed"], self.position.step, self.rank)))

    def _follow_groups(self, incoming: Incoming) -> None:
        """Learning rates and the like as the holders used them: here they may hang on what is not here yet."""
        groups = [h["groups"] for h in incoming.ends.get(self.position.step, {}).values() if "groups" in h]
        if groups:
            self._state().set_groups(groups[0])

    def _partial_step(self, incoming: Incoming, original: Any, *args: Any, **kwargs: Any) -> Any:
        """The others' step, for the parameters of which something is here; what is to come is sent with it applied."""
        state = self._state()
        hidden = [(p, p.grad) for i, p in enumerate(state.parameters) if i not in incoming.have]
        for param, _ in hidden:
            param.grad = None
        try:
            return original(*args, **kwargs)
        finally:
            for param, grad in hidden:
                param.grad = grad
