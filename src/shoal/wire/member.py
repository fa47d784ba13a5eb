"""The worker's side of reconfiguration: a state machine without I/O.

The runtime passes it orders, and reports what happens to its process groups and steps; it answers with effects. The
machine does not decide *when* to switch. The members agree on that themselves, with a flag that is part of each step's
synchronisation (`flag`, `agree`, `boundary`).

Why no step is lost or done twice: a step ends with a *vote*, a tiny all-reduce after the gradients. It completes only
if every member enters it, and a member enters it only with complete gradients. So if a survivor of a broken step lacks
the gradients, no worker has applied them, and all repeat the step. Otherwise all can apply it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from shoal.wire.messages import Kind, Order, Phase, Plan, Status


@dataclass(frozen=True, slots=True)
class Build:
    """Form the group of this plan, in the background."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class Drop:
    """Stop forming the group of this plan, or close it."""

    number: int


@dataclass(frozen=True, slots=True)
class Entries:
    """The rendezvous entries of all members of this plan."""

    number: int
    entries: dict[str, str]


@dataclass(frozen=True, slots=True)
class Interrupt:
    """The generation is dead: stop waiting for its collectives and halt."""

    generation: int


@dataclass(frozen=True, slots=True)
class Enter:
    """The group of a first or recovery generation is formed: continue in it."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class Quit:
    reason: str


Effect = Build | Drop | Entries | Interrupt | Enter | Quit


@dataclass(slots=True)
class Member:
    worker: str
    phase: Phase = Phase.STARTING
    generation: int = 0
    members: tuple[str, ...] = ()
    done: int = 0
    holds: bool = False
    partial: bool = False
    away: bool = True
    dead: int = 0
    seen: int = 0
    plan: Plan | None = None
    formed: int = 0
    broken: int = 0
    committed: bool = False
    agreed: bool = False
    arrived: int = 0
    exchanges: int = 0
    signed: bool = False
    first: bool | None = None
    fresh: bool = False
    lead: bool = False
    checkpoints: int = 0
    address: str = ""
    signature: tuple[str, ...] | None = None
    saved: str | None = None
    why: str | None = None
    board: dict[str, str] = field(default_factory=dict)
    board_of: int = 0
    _order_seq: int = 0
    _status_seq: int = 0

    # Orders of the coordinator

    def reconnected(self) -> None:
        """The connection is new. A coordinator that has restarted counts its orders from 1 again."""
        self._order_seq = 0
        self.signed = False

    def order(self, order: Order) -> list[Effect]:
        if order.seq <= self._order_seq:
            return []
        self._order_seq = order.seq
        self.signed, self.first, self.checkpoints = order.signed, order.first, order.checkpoint
        self.fresh, self.lead = order.fresh, order.lead
        effects: list[Effect] = []
        if order.dead > self.dead:
            effects += self._die(order.dead)
        effects += self._consider(order)
        if order.stop is not None:
            effects.append(Quit(order.stop))
        return effects

    def _die(self, dead: int) -> list[Effect]:
        self.dead = dead
        self.seen = max(self.seen, dead)
        effects: list[Effect] = []
        if self.plan is not None and self.plan.number <= dead:
            effects.append(self._drop())
        if self.phase is Phase.ACTIVE and self.generation <= dead:
            effects.append(Interrupt(self.generation))
        return effects

    def _drop(self) -> Drop:
        assert self.plan is not None
        number = self.plan.number
        self.plan, self.committed, self.agreed, self.formed = None, False, False, 0
        return Drop(number)

    def _consider(self, order: Order) -> list[Effect]:
        plan = order.plan
        if plan is None:
            # A committed plan is never withdrawn: the members may have agreed on it already.
            return [self._drop()] if self.plan is not None and not self.committed else []
        effects: list[Effect] = []
        if self.plan is not None and plan.number > self.plan.number and not self.agreed:
            effects.append(self._drop())
        if self.plan is None and plan.number > max(self.generation, self.dead) and self._fits(plan):
            self.plan, self.seen = plan, max(self.seen, plan.number)
            if self.worker in plan.members:
                effects.append(Build(plan))
            else:
                self.formed = plan.number
        if self.plan is not None and self.plan.number == plan.number:
            self.committed = self.committed or order.commit
            if order.board:
                effects.append(Entries(plan.number, order.board))
        return effects

    def _fits(self, plan: Plan) -> bool:
        """Whether the plan was made for the phase this worker is in. A late plan may not be."""
        if plan.kind is Kind.RECOVER:
            return self.phase is Phase.HALTED
        if plan.kind is Kind.FIRST or self.worker in plan.newcomers:
            return self.phase is Phase.READY
        return self.phase is Phase.ACTIVE and plan.previous == self.generation

    # Reports of the runtime

    def ready(self, signature: tuple[str, ...], address: str) -> None:
        self.phase, self.signature, self.address, self.away = Phase.READY, signature, address, False

    def publish(self, number: int, key: str, value: str) -> None:
        if self.board_of != number:
            self.board, self.board_of = {}, number
        self.board = {**self.board, key: value}

    def group_formed(self, number: int) -> list[Effect]:
        if self.plan is None or self.plan.number != number:
            return [Drop(number)]
        self.formed = number
        if self.plan.kind in (Kind.FIRST, Kind.RECOVER):
            return [Enter(self.plan)]
        return []

    def group_failed(self, number: int) -> None:
        if self.plan is not None and self.plan.number == number:
            self.broken = number

    def enter(self, plan: Plan) -> bool:
        """Continue in a first or recovery generation. True: apply the gradients held from the broken step."""
        apply = self.phase is Phase.HALTED and self.done == plan.resume - 1
        self._into(plan)
        if plan.kind is Kind.FIRST:
            self.partial = plan.members[0] != self.worker
        else:
            self.done = plan.resume
        self._count_anew()
        return apply

    def joined(self, plan: Plan, step: int) -> None:
        """The holders have told this newcomer that they switch after `step`. The state follows."""
        self._into(plan)
        self.done, self.partial = step, True
        self._count_anew()

    def state_complete(self, step: int) -> None:
        self.partial, self.done = False, step

    def restored(self, step: int) -> None:
        """All members have the state after `step` steps, which may be an earlier one."""
        self.done = step
        self._count_anew()

    def _count_anew(self) -> None:
        """All members enter a generation at one point: what they enter in it can be compared from there on."""
        self.arrived, self.exchanges = self.done, 0

    def _into(self, plan: Plan) -> None:
        self.phase, self.generation, self.members = Phase.ACTIVE, plan.number, plan.members
        self.plan, self.committed, self.agreed, self.formed = None, False, False, 0
        self.holds, self.partial, self.seen = False, False, max(self.seen, plan.number)

    # Steps

    @property
    def aborted(self) -> bool:
        return self.generation <= self.dead

    def flag(self) -> int:
        """The number of the generation that this member is ready to switch to after this step. 0: none."""
        plan = self.plan
        ready = plan is not None and self.committed and self.formed == plan.number
        return plan.number if plan is not None and ready and plan.previous == self.generation else 0

    def agree(self) -> None:
        """The vote has shown that all members raised their flag at the same step."""
        assert self.flag()
        self.agreed = True

    def applied(self) -> None:
        self.done += 1

    def boundary(self) -> Plan | None:
        """At a step boundary: the plan to switch to, if the members agreed on one. The caller switches or leaves."""
        if not self.agreed or self.plan is None or self.plan.number <= self.dead:
            return None
        plan = self.plan
        if self.worker in plan.members:
            self._into(plan)
            self._count_anew()
        else:
            self.phase, self.plan, self.agreed = Phase.LEFT, None, False
        return plan

    def halt(self, holds: bool) -> None:
        """The synchronisation of step done + 1 broke, or the generation was declared dead."""
        self.phase, self.holds = Phase.HALTED, holds
        self.agreed = False

    def retreat(self) -> None:
        """Its generation is dead before it received the whole state: wait for another generation."""
        assert self.partial
        assert self.aborted
        self.phase, self.partial, self.members, self.done = Phase.READY, False, (), 0

    def left(self) -> None:
        """Left the job without a switch."""
        self.phase = Phase.LEFT

    def finish(self, stopped: str | None = None) -> None:
        self.phase, self.why = Phase.FINISHED, stopped

    def fail(self, why: str) -> None:
        self.phase, self.why = Phase.FAILED, why

    def status(self) -> Status:
        self._status_seq += 1
        return Status(
            seq=self._status_seq,
            phase=self.phase,
            generation=self.generation,
            members=self.members,
            step=self.done,
            holds=self.holds,
            partial=self.partial,
            away=self.away,
            formed=self.formed,
            broken=self.broken,
            arrived=self.arrived,
            exchanges=self.exchanges,
            dead=self.dead,
            seen=self.seen,
            address=self.address,
            board=self.board if self.plan is not None and self.board_of == self.plan.number else {},
            board_of=self.board_of,
            signature=None if self.signed else self.signature,
            saved=self.saved,
            why=self.why,
        )
