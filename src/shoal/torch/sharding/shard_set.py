"""One sharded set: how the rows follow a change of workers, and what happens when a worker is lost with its rows."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import torch
from shoal.torch.data_order import DataOrder
from shoal.torch.packing import as_bytes
from shoal.torch.receiver import Incoming
from shoal.torch.replica import Replica
from shoal.torch.session import Session
from shoal.torch.sharding.copies import Copies, Neighbours, holder
from shoal.torch.sharding.first_state import receive_description, send_description
from shoal.torch.sharding.gradients import ShardGradients
from shoal.torch.sharding.private import Collectives
from shoal.torch.sharding.shards import Shards
from shoal.torch.sharding.state import ShardedState
from shoal.torch.sharding.together import Together
from shoal.torch.state import random_state, seed_all, set_random_state
from shoal.wire.messages import Plan

NEVER = 1 << 62
LOST = (
    "a worker was lost with its rows of the model, and neither copies nor a checkpoint exist: "
    "let job.shard keep copies (copy_every=100), or write checkpoints (shoal.init(checkpoint_every_s=600))"
)


class ShardSet:
    """The session says which workers train; this makes the layout of the rows follow."""

    def __init__(
        self,
        session: Session,
        order: DataOrder,
        shards: Shards,
        state: ShardedState,
        gradients: ShardGradients | None,
        together: Together,
        note: Callable[[str], None],
        copy_every: int | None,
        checked: bool,
    ) -> None:
        self._session, self._order, self._note = session, order, note
        self.shards, self._state, self._gradients = shards, state, gradients
        self._checked = checked
        self.neighbours = Neighbours(shards, copy_every) if copy_every else None
        self.together = together

    def gather(self, facts: dict[str, Any]) -> dict[str, Any] | None:
        """The whole state at the first worker. All workers call it."""
        return self._state.gather(facts)

    def announce(self) -> None:
        """Tell the user before training starts what a lost worker means."""
        if self.neighbours is not None:
            every = self.neighbours.every
            what = f"the others return to the copies of its rows, at most {every} steps back"
        else:
            what = "the others return to the last checkpoint; without one the job fails (copy_every keeps copies)"
        self._note(f"one sharded set of {len(self.shards.members)} workers: if a worker is lost, {what}")

    # Into a generation

    def begin_first(self, plan: Plan) -> bool:
        """The first worker has all rows. Send each worker its own."""
        session, main = self._session, plan.members[0]
        if session.name == main:
            self._describe(plan)
        elif not self._adopt_incoming(plan):
            return False
        done = self._change(plan, (main,))
        if done:
            self.announce()
        return done

    def join(self, plan: Plan, incoming: Incoming) -> bool:
        """For a newcomer: the holders wait for it."""
        return self._adopt_incoming(plan, incoming) and self._change(plan, plan.holders)

    def admit(self, plan: Plan) -> bool:
        """For a holder, after the switch: give the newcomers their rows."""
        self._describe(plan)
        return self._change(plan, plan.holders)

    def release(self, plan: Plan) -> bool:
        """Before a switch without newcomers: those who leave give their rows to the others, in the present group."""
        session, members = self._session, self.shards.members
        present = self.shards.collectives
        stays = session.name in plan.members
        groups = session.formed(plan) if stays else None
        new = Collectives(groups.data, session.wait, groups.vote) if groups is not None else None
        return self._move(plan.members, present, members, new)

    def released(self) -> bool:
        """After that switch."""
        return self._settled()

    def _describe(self, plan: Plan) -> None:
        send_description(self._session, plan, self._order, self._state.describe)

    def _adopt_incoming(self, plan: Plan, incoming: Incoming | None = None) -> bool:
        description = receive_description(self._session, plan, self._state, incoming)
        if description is None:
            return False
        self._adopt(pickle.loads(description))
        return True

    def _adopt(self, facts: dict[str, Any]) -> None:
        self._order.adopt(facts)
        self._state.adopt(facts)
        self.shards.adopt(facts["shards"])
        seed_all(hash((facts["seed"], self._order.position.step, self._session.rank)))

    def _collectives(self, group: Any) -> Collectives:
        return Collectives(group, self._session.wait, self._session.vote_group)

    def _change(self, plan: Plan, old: tuple[str, ...]) -> bool:
        group = self._collectives(self._session.data_group)
        if not self._move(plan.members, group, plan.members, group, old):
            return False
        if self._session.partial:
            self._session.state_complete(self._order.position.step)
        return self._settled()

    def _move(
        self,
        new: tuple[str, ...],
        moving: Collectives,
        peers: tuple[str, ...],
        after: Collectives | None,
        old: tuple[str, ...] | None = None,
    ) -> bool:
        """Move the rows. In checked mode, compare them bit for bit before and after."""
        shards = self.shards
        if not self._checked:
            return shards.change(new, moving, peers, after, old)
        before = self._state.fingerprint(old or shards.members)
        if not (moving.all_reduce(before) and shards.change(new, moving, peers, after, old)):
            return False
        now = self._state.fingerprint(new)
        if moving.all_reduce(now) and not torch.equal(now, before):
            raise RuntimeError(f"generation {self._session.generation}: rows changed while they moved")
        return not moving.broken

    def _settled(self) -> bool:
        """The layout is new: all workers count from here, and the copies follow."""
        if self._gradients is not None:
            self._gradients.restart()
        return self._copy()

    # Copies

    def copy_if_due(self) -> bool:
        """Between two steps. False if it broke."""
        if self.neighbours is None:
            return True
        step, present = self._order.position.step, self.neighbours.present
        if present is not None and present.step == step:
            return True  # made when the workers changed, or all have returned to them
        return step % self.neighbours.every != 0 or self._copy()

    def _copy(self) -> bool:
        if self.neighbours is None:
            return True
        facts = {**self._order.facts(), "random": random_state(self._session.on_gpu)}
        step, generation = self._order.position.step, self._session.generation
        return self.neighbours.refresh(step, generation, self._state.describe(facts))

    # A lost worker

    def recover(self, plan: Plan, load: Callable[[str], None]) -> bool | None:
        """In the generation of the survivors. True: the present step is done again or completed.

        False: all returned to an earlier step. None: it broke again. `load` reads a checkpoint.
        """
        group = self._collectives(self._session.data_group)
        whole = not self.shards.torn and self.shards.members == plan.members
        count = torch.tensor([int(whole)])
        if not group.all_reduce(count):
            return None
        if int(count) == len(plan.members):
            self.shards.rebind(group)
            if self._gradients is not None:
                self._gradients.restart()
            return True
        done = self._return_to_copies(plan, group)
        if done is None:
            done = self._return_to_checkpoint(plan, group, load)
        if not done or not self._settled():
            return None
        self._session.restored(self._order.position.step)
        return False

    def _return_to_copies(self, plan: Plan, group: Collectives) -> bool | None:
        """None: there are no copies of all rows."""
        mine = self.neighbours.present.number if self.neighbours and self.neighbours.present else NEVER
        oldest = torch.tensor([mine])
        if not group.all_reduce(oldest, torch.distributed.ReduceOp.MIN):
            return False
        if self.neighbours is None or int(oldest) == NEVER:
            return None
        copies = self.neighbours.use(int(oldest))
        sources = self._sources(copies, plan) if copies is not None else ()
        # A worker that joined after the copies has none, and does not know the layout.
        layout = share(group, pickle.dumps((sources, copies.description)) if copies is not None else None)
        if layout is None:
            return False
        sources, description = pickle.loads(layout)
        if not sources:
            return None
        facts = pickle.loads(copies.description if copies is not None else description)
        self._adopt(facts)
        if copies is not None:
            set_random_state(facts["random"])
        held = self.neighbours.held(copies) if copies is not None else (lambda sharded, name: [])
        done = self.shards.change(plan.members, group, plan.members, group, old=sources, held=held)
        self._note(f"a worker was lost: continued from the copies of step {self._order.position.step}")
        return done

    @staticmethod
    def _sources(copies: Copies, plan: Plan) -> tuple[str, ...]:
        """Who has the rows of each worker of the copies' layout. Empty: some are lost with their copies."""
        found = [holder(copies.layout, worker, plan.members) for worker in copies.layout]
        return tuple(w for w in found if w is not None) if None not in found else ()

    def _return_to_checkpoint(self, plan: Plan, group: Collectives, load: Callable[[str], None]) -> bool:
        if plan.restore is None:
            raise RuntimeError(LOST)
        main = plan.members[0]
        description = None
        if self._session.name == main:
            self.shards.reset(self._collectives(None))
            load(plan.restore)
            description = self._state.describe(self._order.facts())
        text = share(group, description)
        if text is None:
            return False
        if self._session.name != main:
            self._adopt(pickle.loads(text))
        return self._move(plan.members, group, plan.members, group, (main,))


def share(group: Collectives, text: bytes | None) -> bytes | None:
    """The bytes of the first worker that has some, on all workers. None if it broke."""
    if group.size == 1:
        return text
    first = torch.tensor([group.rank if text is not None else group.size])
    if not group.all_reduce(first, torch.distributed.ReduceOp.MIN):
        return None
    source = int(first)
    length = torch.tensor([len(text) if text is not None and group.rank == source else 0])
    if not group.broadcast(length, source):
        return None
    data = torch.empty(int(length), dtype=torch.uint8)
    if group.rank == source and text is not None:
        data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return bytes(as_bytes(data)) if group.broadcast(data, source) else None


def make_shard_set(
    shards: Shards,
    session: Session,
    replica: Replica,
    order: DataOrder,
    end_of_backward: Callable[[], None],
    part_done: Callable[[], None],
    note: Callable[[str], None],
    copy_every: int | None,
    checked: bool,
) -> None:
    """Let the job train this sharded model."""
    state = ShardedState(shards, replica.box)
    together = Together(shards)
    gradients = None
    if not session.outside_shoal:
        gradients = ShardGradients(shards, together, end_of_backward, part_done)
    shard_set = ShardSet(session, order, shards, state, gradients, together, note, copy_every, checked)
    replica.use(state, gradients, shard_set=shard_set)
    if replica.on_gpu and not session.outside_shoal:
        session.use_gpu()
