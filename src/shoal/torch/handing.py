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
        if self._catching_up is not None and self._worker is not None:
            self._worker.receiver.open_gate(self._catching_up, self._state(), self.position.step)
        links = self._groups.links if self._groups is not None else []
        if not links:
            return
        worker = self._worker
        assert worker is not None
        head: dict[str, Any] = {"random": (worker.name, random_state(worker.cuda))} if self._final else {}
        told = {}
        if (first or self._final) and any(link.index == 0 for link in links):
            told["description"] = self._state().describe(self._facts(random=False), whole=self._final)
        for link in links:
            described = {**head, **told} if link.index == 0 else head
            link.open_window(Window(self.position.step, self._final, described))

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
            link.close_window(
                self._window_step, end, lambda: self._worker is not None and self._worker.interrupted
            )
        if self._final:
            links.clear()
        self._pause_s += time.perf_counter() - began_s

    # The newcomer's side

    def _look_on(self, groups: Groups, generation: int) -> None:
        """Take part in a step with nothing: zeros for the sums, and the vote that ends it, all at once.

        So no one waits for this worker: neither for its run through the script nor for what is sent to it.
        """
        worker, buckets = self._worker, self._buckets
        assert worker is not None
        assert buckets is not None
        if self._looking is not None:
            buckets.renew()  # that of a plan that was dropped may still write into its memory
        flag = worker.member.flag()
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
            if not incoming.has_ended(step):
                return False
            received = incoming.take(step)
        state.install(received)
        description = incoming.description(step)
        if not incoming.is_final(step):
            if description is not None:
                state.adopt(pickle.loads(description))
            return True
        whole = all(incoming.have.get(i) == p.numel() for i, p in enumerate(state.parameters))
        if description is None or not whole:
            self._note("the state came incomplete")
            return False
        self._adopt(pickle.loads(description), incoming, step)
        with worker.lock:
            worker.member.state_complete(self.position.step)
        return True

    def _adopt(self, facts: dict[str, Any], incoming: Incoming, step: int) -> None:
        self._state().adopt(facts)
        self.position = replace(facts["position"])
        self._take_rule(facts)
        # The random state of whoever's place this worker takes; where there was no one, one of its own.
        assert self._worker is not None
        before = incoming.plan.replaces.get(self._worker.name)
        states = dict(h["random"] for h in incoming.windows[step].values() if "random" in h)
        if before in states:
            set_random_state(states[before])
        else:
            seed_all(hash((facts["seed"], self.position.step, self.rank)))

    def _follow_groups(self, incoming: Incoming) -> None:
        """Learning rates and the like as the holders used them: here they may hang on what is not here yet."""
        groups = incoming.groups.get(self.position.step)
        if groups is not None:
            self._state().set_groups(groups)

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
