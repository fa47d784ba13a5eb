"""A model world for the protocol: workers, their collectives and the wires between, all at an adversary's mercy.

The coordinator and the members are the real ones. Modelled are: the script's loop (compute, gradients, vote,
boundary), the collectives (complete for each member on its own; broken by a death), the forming of groups, the
transfer of state, and a network that may lose, delay, double and reorder.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field

from shoal.wire import coordinator
from shoal.wire.events import Emit, JobFailed, Send, StartWorker, StopWorker
from shoal.wire.groups import group_line
from shoal.wire.member import Build, Drop, Enter, Entries, Interrupt, Member, Quit
from shoal.wire.messages import Kind, Order, Phase, Plan, Status, decode, encode
from shoal.wire.state import CoordinatorState, Timing

TIMING = Timing(heartbeat_timeout_s=60, reconnect_s=20, settle_s=0.5, hang_s=1e9, start_s=1e9)


@dataclass
class Worker:
    member: Member
    alive: bool = True
    at: str = "script"  # script, waiting, compute, gradients, vote, halted, over
    interrupted: bool = False
    quitting: bool = False
    held_generation: int = 0
    building: dict[int, Plan] = field(default_factory=dict)
    boards: dict[int, dict[str, str]] = field(default_factory=dict)
    entering: Plan | None = None
    joining: Plan | None = None
    orders: list[Order] = field(default_factory=list)  # under way to it
    statuses: list[Status] = field(default_factory=list)  # under way from it


class World:
    def __init__(self, seed: int = 0, group: int = 1) -> None:
        self.signature = ("parameter w float32 [2]", *((group_line(group),) if group > 1 else ()))
        self.random = random.Random(seed)
        self.now_s = 0.0
        self.state = CoordinatorState("job", "paused", timing=TIMING)
        self.workers: dict[str, Worker] = {}
        self.kills: list[str] = []  # the executor has not got round to these yet
        self.events: list[object] = []
        self.names = 0
        # The collectives: who has entered what.
        self.in_gradients: dict[tuple[int, int], set[str]] = {}
        self.in_vote: dict[tuple[int, int], dict[str, int]] = {}
        self.handed: dict[tuple[str, int], dict[str, int]] = {}  # (newcomer, generation) -> {holder: step}
        self.windows: dict[int, int] = {}  # generation -> in how many steps its newcomers are given the state
        # What was done, for the invariants.
        self.applied: dict[int, int] = {}  # step -> the generation whose gradients were applied
        self.fresh_start = True

    # The coordinator's surroundings

    def perform(self, effects: list) -> None:
        for effect in effects:
            match effect:
                case Send(worker, order):
                    if worker in self.workers:
                        self.workers[worker].orders.append(decode(encode(order)))
                case StartWorker(worker):
                    self.workers[worker] = Worker(Member(worker, address=f"at-{worker}"))
                case StopWorker(worker, kill, _):
                    if kill:
                        self.kills.append(worker)
                    elif worker in self.workers:
                        self.workers[worker].quitting = True
                case Emit(event):
                    self.events.append(event)
                    assert not isinstance(event, JobFailed), event

    def new_names(self, count: int) -> list[str]:
        self.names += count
        return [f"w{i}" for i in range(self.names - count, self.names)]

    def set_target(self, workers: list[str]) -> None:
        self.perform(coordinator.set_target(self.state, workers, self.now_s))

    def tick(self, seconds: float = 0.6) -> None:
        self.now_s += seconds
        for name, worker in self.workers.items():
            if worker.alive and worker.at != "script":
                self.say(name)
        self.perform(coordinator.tick(self.state, self.now_s))

    def restart_coordinator(self) -> None:
        self.state = CoordinatorState.from_dict(
            json.loads(json.dumps(self.state.to_dict())), self.now_s, TIMING
        )
        for name, worker in self.workers.items():
            worker.orders.clear()
            worker.statuses.clear()
            if worker.alive and worker.at != "script":
                self.connect(name)

    def connect(self, name: str) -> None:
        worker = self.workers[name]
        worker.member.reconnected()
        worker.orders.clear()
        self.perform(coordinator.connected(self.state, name, self.now_s))
        self.say(name)

    def deliver_status(self, name: str, index: int = 0, keep: bool = False) -> None:
        worker = self.workers[name]
        status = worker.statuses[index] if keep else worker.statuses.pop(index)
        self.perform(coordinator.received(self.state, name, status, self.now_s))

    # The worker's surroundings

    def say(self, name: str) -> None:
        worker = self.workers[name]
        worker.statuses.append(decode(encode(worker.member.status())))

    def deliver_order(self, name: str, index: int = 0, keep: bool = False) -> None:
        worker = self.workers[name]
        order = worker.orders[index] if keep else worker.orders.pop(index)
        if not worker.alive:
            return
        self.react(name, worker.member.order(order))
        self.say(name)

    def react(self, name: str, effects: list) -> None:
        worker = self.workers[name]
        for effect in effects:
            match effect:
                case Build(plan):
                    worker.building[plan.number] = plan
                    worker.member.publish(plan.number, name, f"address of {name}")
                case Drop(number):
                    worker.building.pop(number, None)
                case Entries(number, entries):
                    worker.boards[number] = entries
                case Interrupt():
                    worker.interrupted = True
                case Enter(plan):
                    worker.entering = plan
                case Quit():
                    worker.quitting = True

    def kill(self, name: str) -> None:
        worker = self.workers[name]
        if worker.alive:
            worker.alive = False
            self.perform(coordinator.exited(self.state, name, "killed", self.now_s))

    # The worker's own moves: each call makes at most one

    def move(self, name: str) -> bool:
        worker = self.workers[name]
        if not worker.alive:
            return False
        if worker.quitting:
            self.kill(name)
            return True
        moved = self.form(name) or getattr(self, f"_{worker.at}")(name, worker)
        if moved and worker.alive:
            self.say(name)
        return moved

    def form(self, name: str) -> bool:
        worker = self.workers[name]
        for number, plan in list(worker.building.items()):
            if len(worker.boards.get(number, {})) < len(plan.members):
                continue
            del worker.building[number]
            # A member that died while the group formed: it may stand or fall, for each on its own.
            if any(not self.workers[m].alive for m in plan.members) and self.random.random() < 0.5:
                worker.member.group_failed(number)
            else:
                self.react(name, worker.member.group_formed(number))
            return True
        return False

    def _script(self, name: str, worker: Worker) -> bool:
        worker.at = "waiting"
        self.connect(name)
        worker.member.ready(self.signature, f"at-{name}")
        return True

    def _waiting(self, name: str, worker: Worker) -> bool:
        if worker.entering is not None:
            return self._enter(name, worker)
        plan = worker.member.plan
        if plan is None or plan.kind is not Kind.SWITCH or worker.member.formed != plan.number:
            return False
        words = self.handed.get((name, plan.number), {})
        if not words:
            return False
        worker.member.joined(plan, min(words.values()))
        worker.joining, worker.at = plan, "compute"
        return True

    def _enter(self, name: str, worker: Worker) -> bool:
        plan, worker.entering = worker.entering, None
        assert plan is not None
        if plan.number <= worker.member.dead:
            return False
        worker.interrupted = False
        if worker.member.enter(plan):
            self._record(plan.resume, worker.held_generation)
        worker.at = "compute"
        if plan.kind is Kind.FIRST:
            if plan.members[0] == name:
                self.applied.clear()  # from the beginning, or from a checkpoint
                for other in plan.members[1:]:
                    self.handed[other, plan.number] = {name: 0}
            else:
                worker.joining = plan
        return True

    def _halt(self, worker: Worker, holds: bool) -> bool:
        worker.held_generation = worker.member.generation
        worker.member.halt(holds)
        worker.at, worker.interrupted, worker.joining = "halted", False, None
        return True

    def _receive(self, name: str, worker: Worker) -> None:
        """State is complete once every holder has handed its part over, in the last of several steps."""
        plan = worker.joining
        if plan is None:
            return
        sources = plan.holders or plan.members[:1]
        words = self.handed.get((name, plan.number), {})
        begun = min(words.values(), default=0)
        if plan.kind is Kind.SWITCH and worker.member.done < begun + self.windows[plan.number] - 1:
            return
        if set(words) >= set(sources):
            assert len(set(words.values())) == 1, "holders switched after different steps"
            worker.member.state_complete(worker.member.done)
            worker.joining = None

    def _window_closed(self, name: str, worker: Worker) -> bool:
        """A newcomer applies a step to the part it has when it knows from all holders which part that is."""
        plan = worker.joining
        if plan is None or plan.kind is not Kind.SWITCH:
            return False
        begun = min(self.handed[name, plan.number].values())
        if worker.member.done >= begun + self.windows[plan.number] - 1:
            return False
        return all(self.workers[s].member.done > worker.member.done for s in plan.holders)

    def _compute(self, name: str, worker: Worker) -> bool:
        member = worker.member
        self._receive(name, worker)
        if worker.interrupted:
            return self._halt(worker, False)
        if member.partial and member.members[0] != name and member.plan is None and self._first(worker):
            return False  # a first generation waits for its state before the first step
        self.in_gradients.setdefault((member.generation, member.done + 1), set()).add(name)
        member.arrived = member.done + 1
        worker.at = "gradients"
        return True

    @staticmethod
    def _first(worker: Worker) -> bool:
        return worker.joining is not None and worker.joining.kind is Kind.FIRST

    def _broken(self, generation: int, members: tuple[str, ...]) -> bool:
        return any(not self.workers[m].alive or self.workers[m].at == "halted" for m in members)

    def _gradients(self, name: str, worker: Worker) -> bool:
        member = worker.member
        self._receive(name, worker)
        if worker.interrupted:
            return self._halt(worker, False)
        everyone = self.in_gradients[member.generation, member.done + 1] >= set(member.members)
        broken = self._broken(member.generation, member.members)
        if broken and (not everyone or self.random.random() < 0.5):
            return self._halt(worker, False)
        if not everyone:
            return False
        # A newcomer votes even while its state is still coming: the others need not wait for it.
        self.in_vote.setdefault((member.generation, member.done + 1), {})[name] = member.flag()
        worker.at = "vote"
        return True

    def _vote(self, name: str, worker: Worker) -> bool:
        member = worker.member
        if worker.interrupted:
            return self._halt(worker, True)
        flags = self.in_vote[member.generation, member.done + 1]
        everyone = set(flags) >= set(member.members)
        broken = self._broken(member.generation, member.members)
        if broken and (not everyone or self.random.random() < 0.5):
            return self._halt(worker, True)
        self._receive(name, worker)
        if not everyone or (member.partial and not self._window_closed(name, worker)):
            return False
        if len(set(flags.values())) == 1 and next(iter(flags.values())):
            member.agree()
        self._apply(worker, held_from=member.generation)
        self._boundary(name, worker)
        return True

    def _apply(self, worker: Worker, held_from: int) -> None:
        self._record(worker.member.done + 1, held_from)
        worker.member.applied()

    def _record(self, step: int, held_from: int) -> None:
        before = self.applied.setdefault(step, held_from)
        assert before == held_from, f"step {step} done in generations {before} and {held_from}"
        assert step == 1 or step - 1 in self.applied, f"step {step - 1} was lost"

    def _boundary(self, name: str, worker: Worker) -> None:
        plan = worker.member.boundary()
        worker.at = "compute"
        if plan is None:
            return
        self.windows.setdefault(plan.number, self.random.randint(1, 4))
        for newcomer in plan.newcomers:
            self.handed.setdefault((newcomer, plan.number), {})[name] = worker.member.done
        if name not in plan.members:
            stay = [self.workers[m].member for m in plan.members if self.workers[m].alive]
            assert not any(m.partial for m in stay), "who had the whole state left before all who stay had it"
            worker.at = "over"
            worker.member.saved = plan.save

    def _halted(self, name: str, worker: Worker) -> bool:
        if worker.member.partial:
            if not worker.member.aborted:
                return False
            worker.member.retreat()
            worker.at, worker.interrupted = "waiting", False
            return True
        return self._enter(name, worker) if worker.entering is not None else False

    def _over(self, name: str, worker: Worker) -> bool:
        return False

    # A time of peace

    def peace(self, rounds: int = 60) -> None:
        for _ in range(rounds):
            for name in list(self.workers):
                worker = self.workers[name]
                while worker.statuses:
                    self.deliver_status(name)
                while worker.orders:
                    self.deliver_order(name)
                self.move(name)
            while self.kills:
                self.kill(self.kills.pop())
            self.tick()

    def check(self) -> None:
        """Never two generations at work: a step in flight is in flight in one generation only."""
        at_work = {
            w.member.generation
            for w in self.workers.values()
            if w.alive and w.at == "vote" and w.member.generation > self.state.dead
        }
        stepping = [g for g in at_work if self._can_complete(g)]
        assert len(stepping) <= 1, stepping

    def _can_complete(self, generation: int) -> bool:
        members = next(w.member.members for w in self.workers.values() if w.member.generation == generation)
        alive = [self.workers[m] for m in members]
        return all(
            w.alive and w.member.generation == generation and w.at in ("gradients", "vote") for w in alive
        )

    def training(self) -> list[str]:
        return [n for n, w in self.workers.items() if w.alive and w.member.phase is Phase.ACTIVE]
