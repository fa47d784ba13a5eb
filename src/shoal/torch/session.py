"""Membership: which generation this worker is in, with whom, and the verbs that change it.

A session owns the `Worker` (control link, wire member, process groups). It knows nothing of models, gradients or
data: `Reconfiguration` calls its verbs and makes the other parts follow.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from shoal.torch.gradients import Sync, sum_of_one
from shoal.torch.priority import lower_priority
from shoal.torch.receiver import Incoming, Receiver
from shoal.torch.transfer import Link
from shoal.torch.worker import Groups, Worker
from shoal.wire.member import Member
from shoal.wire.messages import Kind, Phase, Plan

LEAVE_TIMEOUT_S = 10.0
#: How long a finished worker waits for a control plane that restarts.
UNHEARD_S = 30.0


@dataclass(frozen=True, slots=True)
class Place:
    """A generation that this worker may enter, or a committed plan that will become one (`committed`)."""

    plan: Plan
    committed: bool = False


class Session:
    """Without a worker (a script outside Shoal) it is the only member of generation 0 for good."""

    def __init__(self, worker: Worker | None) -> None:
        self._worker_or_none = worker
        self._groups: Groups | None = None
        self._holders: Groups | None = None  # the holders' groups alone, while newcomers receive the state
        self._joined = worker is None
        self._fresh: bool | None = None
        #: Its generation broke before this worker had the whole state. It has to join again.
        self.retreated = False
        self.contributors: tuple[int, ...] = (0,)
        self.next_contributors: tuple[int, ...] = (0,)

    # Who is in the generation

    @property
    def outside_shoal(self) -> bool:
        return self._worker_or_none is None

    @property
    def joined(self) -> bool:
        return self._joined

    @property
    def _worker(self) -> Worker:
        assert self._worker_or_none is not None
        return self._worker_or_none

    @property
    def _member(self) -> Member:
        return self._worker.member

    @property
    def name(self) -> str:
        return "alone" if self.outside_shoal else self._worker.name

    @property
    def job(self) -> str:
        return self._worker.identity.job

    @property
    def rank(self) -> int:
        if self.outside_shoal or self.name not in self._member.members:
            return 0
        return self._member.members.index(self.name)

    @property
    def world_size(self) -> int:
        return 1 if self.outside_shoal else max(1, len(self._member.members))

    @property
    def generation(self) -> int:
        return 0 if self.outside_shoal else self._member.generation

    @property
    def done(self) -> int:
        """How many votes have completed. With one optimizer that is the number of steps."""
        return 0 if self.outside_shoal else self._member.done

    @property
    def members(self) -> tuple[str, ...]:
        return ("alone",) if self.outside_shoal else self._member.members

    @property
    def growing(self) -> bool:
        """Newcomers receive the state. They have no part of the batch yet."""
        return self.contributors != self.next_contributors

    @property
    def relays(self) -> bool:
        """While newcomers receive the state, the holders sum gradients among themselves and send them the sums.

        Not on GPUs: there newcomers take part with zeros, as the sums would have to pass through the host. With shard
        groups they do anyway.
        """
        grouped = self._groups is not None and self._groups.shard is not None
        return self.growing and (grouped or not self.on_gpu)

    @property
    def on_gpu(self) -> bool:
        return not self.outside_shoal and self._worker.cuda

    def use_gpu(self) -> None:
        self._worker.cuda = True

    # Its process groups

    @property
    def data_group(self) -> Any:
        """For gradients. None if this worker is the only member."""
        return self._groups.data if self._groups is not None else None

    @property
    def vote_group(self) -> Any:
        return self._groups.vote if self._groups is not None else None

    @property
    def meet_group(self) -> Any:
        """For what the script exchanges."""
        return self._groups.meet if self._groups is not None else None

    @property
    def shard_groups(self) -> tuple[Any, Any]:
        """The workers that share one sharded model with this one: their group, and the one for host memory."""
        assert self._groups is not None
        return self._groups.shard, self._groups.shard_host

    @property
    def replica_group(self) -> Any:
        """The workers that have the same shard and a part of the batch. None if there is no other."""
        groups = self._holders or self._groups
        return groups.replicas if groups is not None else None

    @property
    def links(self) -> list[Link]:
        """The links to newcomers to which this worker sends the state."""
        return self._groups.links if self._groups is not None else []

    def release_links(self) -> None:
        """All is sent: each link closes itself once its newcomer has read everything."""
        self.links.clear()

    @property
    def sends_sums(self) -> bool:
        return self._holders is not None and self._groups is not None

    def summing(self, sync: Sync) -> tuple[Any, Sync]:
        """The group in which gradients are summed, and how: while newcomers receive the state, the holders' group."""
        if self._holders is None:
            return self.data_group, sync
        return self._holders.data, sync if self._holders.data is not None else sum_of_one

    def coming_links(self, flag: int) -> tuple[Plan, list[Link]] | None:
        """The links to the newcomers of the plan with this number, if it has some and its group is formed."""
        plan, groups = self._member.plan, self._worker.formed(flag) if flag else None
        return (plan, groups.links) if groups is not None and plan is not None and plan.newcomers else None

    def wait(self, work: Any) -> bool:
        """Whether a collective completed. False if it broke or its generation is dead."""
        return self._worker.wait(work)

    # The control link

    @property
    def lock(self) -> threading.Condition:
        """Guards everything that the control thread changes. Reentrant."""
        return self._worker.lock

    def wait_for(self, ready: Callable[[], Any]) -> Any:
        """The first true value of `ready`, which is called under the lock. Ends the process if it has to quit."""
        return self._worker.wait_for(ready)

    @property
    def interrupted(self) -> bool:
        """The coordinator has declared this generation dead."""
        return not self.outside_shoal and self._worker.interrupted

    def notify(self) -> None:
        """Send the status soon."""
        self._worker.link.say()

    def set_away(self, away: bool) -> bool:
        """Report whether the script is outside its steps, where it may take its time. Returns the former value."""
        if self.outside_shoal:
            return away
        before, self._member.away = self._member.away, away
        if away != before:
            self.notify()
        return before

    @property
    def checkpoints_asked(self) -> int:
        return 0 if self.outside_shoal else self._member.checkpoints

    def saved(self, path: str) -> None:
        """The state for a pause is at `path`."""
        with self.lock:
            self._member.saved = path

    # Steps

    def arrived(self, step: int) -> None:
        """Entered the synchronization of this step."""
        with self.lock:
            self._member.arrived = step

    def exchanges(self) -> None:
        """Entered an exchange of the script's values. After the training the others have ended, too, or will."""
        with self.lock:
            self._member.exchanges += self.training

    def flag(self) -> int:
        return self._member.flag()

    def agree(self, flag: int) -> None:
        with self.lock:
            if self._member.flag() == flag:
                self._member.agree()

    @property
    def agreed(self) -> bool:
        """All members switch at this boundary."""
        return self._member.agreed

    def applied(self) -> None:
        """One more step is done."""
        with self.lock:
            self._member.applied()

    def decide_alone(self, plan_window: Callable[[int], None]) -> None:
        """The only member decides without a vote. `plan_window` is called with the flag it would raise."""
        with self.lock:
            if len(self._member.members) == 1:
                self._member.arrived = self._member.done
                if flag := self._member.flag():
                    plan_window(flag)
                    self._member.agree()

    # Joining

    def is_first_start(self) -> bool:
        """Whether the job has no state yet: this worker's script starts it."""
        self.wait_for(lambda: self._member.first is not None)
        return bool(self._member.first)

    @property
    def leads(self) -> bool:
        """Before it joins: whether the job has no state yet and this worker is to be rank 0."""
        return self.outside_shoal or (self.is_first_start() and self._member.lead)

    @property
    def is_fresh(self) -> bool:
        """Whether this worker's script began the job, not a newcomer's or that of a job which was resumed."""
        if not self.outside_shoal and self._fresh is None:
            self._fresh = self.is_first_start() and self._member.fresh
        return self._fresh is not False

    def announce(self, signature: tuple[str, ...]) -> None:
        """This worker is ready to join."""
        with self.lock:
            self._member.ready(signature, self._worker.receiver.address)
        self.notify()

    def next_place(self, voted: int, at_once: bool = False) -> Place:
        """Wait for a place in a generation, or for a committed plan other than the one it has `voted` in.

        `at_once`: it does not vote before it has a place.
        """

        def place() -> Place | None:
            if plan := self._worker.entering or self.offered_plan():
                return Place(plan)
            if at_once:
                return None
            coming = self.committed_plan()
            return Place(coming, committed=True) if coming and coming.number != voted else None

        found: Place = self.wait_for(place)
        return found

    def next_entry(self) -> Plan:
        """Wait for a generation to enter, without a part in a step before that."""
        plan: Plan = self.wait_for(lambda: self._worker.entering or self.offered_plan())
        return plan

    def committed_plan(self) -> Plan | None:
        """A plan with this worker as a newcomer that is committed and whose group is formed."""
        plan = self._member.plan
        if plan is None or plan.kind is not Kind.SWITCH or not self._member.committed:
            return None
        return plan if self._member.formed == plan.number else None

    def offered_plan(self) -> Plan | None:
        """The plan whose holders have switched and begun to send."""
        plan = self._member.plan
        if plan is None or plan.kind is not Kind.SWITCH or self._member.formed != plan.number:
            return None
        incoming = self.receiver.get(plan.number)
        return plan if incoming is not None and incoming.offered is not None else None

    def formed(self, plan: Plan) -> Groups | None:
        return self._worker.formed(plan.number)

    @property
    def receiver(self) -> Receiver:
        return self._worker.receiver

    def enter(self, plan: Plan) -> bool | None:
        """Enter a first or recovery generation. True: apply the gradients that it holds of the broken step.

        None: the plan was dropped at the last moment.
        """
        with self.lock:
            if self._worker.entering is not plan:
                return None
            self._worker.entering, self._worker.interrupted = None, False
            apply = self._member.enter(plan)
            self._use(plan, plan.members)
        return apply

    def join(self, plan: Plan, at_once: bool = False) -> Incoming | None:
        """Enter a running generation as a newcomer. None: the plan was dropped at the last moment.

        `at_once`: it receives the whole state now and has its part of the next batch.
        """
        with self.lock:
            incoming = self.receiver.get(plan.number)
            step = incoming.offered if incoming is not None else None
            if incoming is None or step is None or self._member.plan is not plan:
                self._joined = False
                return None
            self._member.joined(plan, step)
            self._use(plan, plan.members if at_once else plan.holders)
            return incoming

    def restored(self, step: int) -> None:
        """The state is that of a checkpoint or of copies after `step` steps."""
        with self.lock:
            self._member.restored(step)

    def state_complete(self, step: int) -> None:
        """This worker has received the whole state, as after `step` steps."""
        with self.lock:
            self._member.state_complete(step)

    def newcomers_complete(self) -> None:
        """The newcomers hold the state: from now on they have their part of the batch."""
        self.contributors = self.next_contributors
        self._worker.retire(self._holders)
        self._holders = None

    def _use(self, plan: Plan, contributors: tuple[str, ...]) -> None:
        old, self._groups = self._groups, self._worker.take(plan.number)
        self._joined, self.retreated = True, False
        if self._fresh is None:  # a script that asks only after its training must not wait for a coordinator
            self._fresh = plan.kind is Kind.FIRST and not plan.restore
        self.contributors = tuple(i for i, m in enumerate(plan.members) if m in contributors)
        self.next_contributors = tuple(range(len(plan.members)))
        self._worker.retire(self._holders)
        self._holders = old if self.relays else None
        if self._holders is None:
            self._worker.retire(old)

    # Switching, breaking, leaving

    def pause_to_save(self) -> Plan | None:
        """The agreed plan if it is a pause and this worker has to save the state for it."""
        plan = self._member.plan
        return plan if plan is not None and plan.kind is Kind.PAUSE and plan.holders[0] == self.name else None

    def agreed_plan(self) -> Plan | None:
        return self._member.plan if self._member.agreed else None

    def switch(self, at_once: bool = False) -> Plan | None:
        """Switch to the agreed generation. This worker has left if it is not among its members."""
        with self.lock:
            plan = self._member.boundary()
            if plan is not None and self.name in plan.members:
                self._use(plan, plan.members if at_once else plan.holders)
            return plan

    def halt(self, holds: bool) -> None:
        """The generation broke. `holds`: this worker has the complete gradients of the broken step."""
        with self.lock:
            self._worker.interrupted = False
            self._member.halt(holds)
        self.notify()

    @property
    def partial(self) -> bool:
        """This worker has received only part of the state."""
        return self._member.partial

    def recover(self) -> tuple[Plan, bool]:
        """Wait for the generation of the survivors and enter it. See `enter`."""
        while True:
            plan: Plan = self.wait_for(lambda: self._worker.entering)
            apply = self.enter(plan)
            if apply is not None:
                return plan, apply

    def retreat(self) -> None:
        """Leave the broken generation, in which this worker never had the whole state."""
        self.wait_for(lambda: self._member.aborted)
        with self.lock:
            self._worker.interrupted = False
            self.receiver.forget(self._member.generation)
            self._member.retreat()
        self._worker.retire(self._groups)
        self._groups, self._joined, self.retreated = None, False, True
        self.contributors = self.next_contributors = (0,)

    def give_up(self) -> NoReturn:
        """The job has finished before this worker had the whole state."""
        self._member.left()
        self.leave()

    def leave(self) -> NoReturn:
        self._worker.link.say_now()
        lower_priority()
        # Stay until the others have read all that was sent to them.
        self.wait_for_quit()
        raise SystemExit(0)

    def be_replaced(self, why: str) -> NoReturn:
        """End as a lost worker: the control plane starts another one in its place."""
        print(f"this worker ends and is replaced: {why}", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("a killed process goes on")

    # How the script ends

    @property
    def training(self) -> bool:
        """Neither finished, failed nor left."""
        return self._member.phase in (Phase.STARTING, Phase.ACTIVE)

    @property
    def finished(self) -> bool:
        """Its training is done: no coordinator replaces its generation any more."""
        return not self.outside_shoal and self._member.phase is Phase.FINISHED

    def finish(self, stopped: str | None = None) -> None:
        with self.lock:
            self._member.finish(stopped)
        self._worker.link.say_now()

    def fail(self, why: str) -> None:
        with self.lock:
            self._member.fail(why)
        self._worker.link.say_now()

    def await_end(self) -> None:
        """Keep a finished process until the coordinator has read that.

        Also for some time if no control plane is there: the next one may not know that this worker ever joined, and
        would take its exit for that of a script that does not use Shoal.
        """
        if self._member.phase is Phase.FINISHED and self._worker.link.up.wait(UNHEARD_S):
            self.wait_for_quit()

    def wait_for_quit(self) -> None:
        with self.lock:
            self.lock.wait_for(lambda: self._worker.quit is not None, timeout=LEAVE_TIMEOUT_S)
