"""Replicated shard groups: groups of k workers that share one sharded model, added and removed as a whole.

A group is to a sharded model what a worker is to a replicated one. The worker with shard i hands its rows to the one
with shard i of a new group, streamed beside the training (see handover.py). So this is little: which shard a worker
has, and over whom torch gathers and scatters.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import torch
from shoal.torch.data_order import DataOrder
from shoal.torch.replica import Replica
from shoal.torch.session import Session
from shoal.torch.sharding.first_state import receive_description, send_description
from shoal.torch.sharding.group_gradients import GroupGradients
from shoal.torch.sharding.group_shards import GroupShards
from shoal.torch.sharding.group_state import GroupState
from shoal.torch.sharding.private import Collectives
from shoal.torch.sharding.together import Together
from shoal.torch.state import seed_all
from shoal.wire.messages import Plan


class ShardGroups:
    def __init__(
        self,
        session: Session,
        order: DataOrder,
        shards: GroupShards,
        state: GroupState,
        gradients: GroupGradients | None,
        together: Together,
        note: Callable[[str], None],
        size: int,
    ) -> None:
        self._session, self._order, self._note, self._size = session, order, note, size
        self.shards, self._state, self._gradients = shards, state, gradients
        self.together = together

    # Checkpoints: the first group gathers, and its first worker saves

    def gather(self, facts: dict[str, Any]) -> dict[str, Any] | None:
        """The whole state at rank 0. None elsewhere, or if it broke."""
        return self._state.gather(facts) if self._session.rank < self._size else None

    # Into a generation

    def begin_first(self, plan: Plan) -> bool:
        """Rank 0 has all rows. Every worker takes those of its shard."""
        session = self._session
        if session.rank == 0:
            send_description(session, plan, self._order, self._state.describe_all)
        else:
            description = receive_description(session, plan, self._state)
            if description is None:
                return False
            facts = pickle.loads(description)
            self._order.adopt(facts)
            self._state.adopt(facts)
            self.shards.adopt(facts["shards"])
            seed_all(hash((facts["seed"], self._order.position.step, session.rank)))
        everyone = Collectives(session.data_group, session.wait, session.vote_group)
        if not self.shards.scatter(everyone, self._mates(plan), self._collectives(plan), self._shard(plan)):
            return False
        self._laid_out()
        if session.partial:
            session.state_complete(self._order.position.step)
        self._announce(plan)
        return True

    def _announce(self, plan: Plan) -> None:
        """Tell the user before training starts what a lost worker means."""
        self._note(
            f"shard groups of {self._size} workers, {len(plan.members) // self._size} of them: if a worker is lost, "
            "the other groups continue without its group; if there is no other, the job starts again from its last "
            "checkpoint"
        )

    def place(self, plan: Plan) -> None:
        """For a newcomer: make room for the rows of its shard. They are received later."""
        self.shards.assume(self._mates(plan), self._collectives(plan), self._shard(plan))
        self._laid_out()

    def release(self, plan: Plan) -> bool:
        """Before a switch without newcomers: who gets another shard receives it from a worker that has it."""
        session, size = self._session, self._size
        before = {w: rank % size for rank, w in enumerate(session.members)}
        after = {w: rank % size for rank, w in enumerate(plan.members)}
        wanted = {w: shard for w, shard in after.items() if before[w] != shard}
        if not wanted:
            return True
        everyone = Collectives(session.data_group, session.wait, session.vote_group)
        sources = {w: next(m for m in session.members if before[m] == shard) for w, shard in wanted.items()}
        return self.shards.fetch(everyone, session.members, sources, wanted, size)

    def entered(self, plan: Plan) -> None:
        """After a switch, or in the generation of survivors: torch gathers over the group of this generation."""
        if self.shards.fetched is not None:
            self.shards.take_fetched(self._mates(plan), self._collectives(plan), self._shard(plan))
            self._laid_out()
        else:
            self.shards.rebind(self._collectives(plan), self._mates(plan))
        if self._gradients is not None:
            self._gradients.restart()

    def recover(self, plan: Plan) -> bool | None:
        """In the generation of the survivors, whose groups are whole. None: it broke again."""
        self.shards.fetched = None
        group = Collectives(self._session.data_group, self._session.wait, self._session.vote_group)
        right = torch.tensor([int(self.shards.shard == self._shard(plan))])
        if not group.all_reduce(right):
            return None
        if int(right) != len(plan.members):
            raise RuntimeError(
                "a worker was lost while others exchanged their shards: the job has to start from its last checkpoint"
            )
        self.entered(plan)
        return True

    def _laid_out(self) -> None:
        self._state.refresh()
        if self._gradients is not None:
            self._gradients.refresh()
            self._gradients.restart()

    def _shard(self, plan: Plan) -> int:
        return plan.members.index(self._session.name) % self._size

    def _mates(self, plan: Plan) -> tuple[str, ...]:
        first = plan.members.index(self._session.name) // self._size * self._size
        return plan.members[first : first + self._size]

    def _collectives(self, plan: Plan) -> Collectives:
        group, host = self._session.shard_groups
        return Collectives(group, self._session.wait, host)


def make_shard_groups(
    shards: GroupShards,
    session: Session,
    replica: Replica,
    order: DataOrder,
    end_of_backward: Callable[[], None],
    part_done: Callable[[], None],
    note: Callable[[str], None],
    size: int,
) -> None:
    """Let the job train this sharded model in groups of `size` workers."""
    state = GroupState(shards, replica.box, size)
    together = Together(shards)
    gradients = None
    if not session.outside_shoal:
        gradients = GroupGradients(shards, together, session, end_of_backward, part_done)
    groups = ShardGroups(session, order, shards, state, gradients, together, note, size)
    replica.use(state, gradients, shard_groups=groups)
    if replica.on_gpu and not session.outside_shoal:
        session.use_gpu()
