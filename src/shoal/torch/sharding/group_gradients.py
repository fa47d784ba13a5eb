"""The gradients of shard groups: torch sums them within a group, and here they are summed over the groups.

Each worker has its shard of the gradients at the end of backward. They are put into flat buckets and summed over the
workers that have the same shard, as the gradients of a replicated model are. Newcomers receive these sums.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from shoal.torch.aside import WIDTH
from shoal.torch.gradients import Bucket, Done, Slot, Sync
from shoal.torch.session import Session
from shoal.torch.sharding import private
from shoal.torch.sharding.gradients import ShardGradients, Summed
from shoal.torch.sharding.private import Sharded
from shoal.torch.sharding.shards import Shards
from shoal.torch.sharding.together import Together
from torch import Tensor

BUCKET_BYTES = 25 << 20
FLAGS = WIDTH  # in the last bucket, after the numbers, for each parameter: how many workers have a gradient


class GroupGradients(ShardGradients):
    """The last bucket is summed over all workers, the others over those with the same shard."""

    def __init__(
        self,
        shards: Shards,
        together: Together,
        session: Session,
        complete: Callable[[], None],
        part_complete: Callable[[], None],
    ) -> None:
        super().__init__(shards, together, complete, part_complete)
        self._session = session
        self._group: Any = None
        self._sync: Sync | None = None
        self._observing = False
        self.refresh()

    def refresh(self) -> None:
        """The layout has changed: make buckets of its sizes."""
        self._trained = [s for s in self._shards.all() if s.param.requires_grad]
        self._fresh_buckets()

    def _fresh_buckets(self) -> None:
        self.buckets: list[Any] = []
        run: list[Sharded] = []
        run_bytes = 0
        for sharded in self._trained:
            local = sharded.local
            if run and (run_bytes >= BUCKET_BYTES or local.dtype != run[0].local.dtype):
                self.buckets.append(_bucket(run))
                run, run_bytes = [], 0
            run.append(sharded)
            run_bytes += local.numel() * local.element_size()
        if run:
            self.buckets.append(_bucket(run))
        self._numbers = torch.zeros(FLAGS + len(self._trained))
        self.buckets.append(Bucket(self._numbers, []))
        self._slots: list[Slot] = [slot for bucket in self.buckets for slot in bucket.slots]
        self._filled = False

    # Backward

    def arm(
        self,
        group: Any,
        sync: Sync,
        weight: float,
        first: bool,
        last: bool,
        share: float | None = None,
        earlier: float | None = 1.0,
    ) -> None:
        self._group, self._sync, self._observing = group, sync, False
        super().arm(group, sync, weight, first, last, share, earlier)

    def _reduced(self, layer: int, part: Tensor) -> None:
        # Here always: what is still there is a sum over all groups already.
        if self._armed and not self._queued and self._first and not self._observing:
            self._check_empty(self._trained)
        super()._reduced(layer, part)

    def watch(self, last: bool = True) -> None:
        """For a newcomer: only call `complete` at the end of the next backward. It receives the others' sums."""
        self._observing, self._last = True, last
        self._together.step_begins()
        self._armed, self._closed, self._queued = True, False, False

    def let_go(self) -> None:
        """The buckets receive the others' sums now: no gradient may be a view of them."""
        self.works, self._filled = [Done()] * len(self.buckets), True
        for sharded in self._trained:
            sharded.param.grad = None

    def observe(self, group: Any, sync: Sync) -> None:
        """A newcomer adds nothing to the sums: it receives them, also on GPUs."""

    def _end_of_backward(self) -> None:
        if not self._armed:
            return
        self._armed, self._closed = False, True
        if not self._last:
            self._part_complete()
            return
        if not self._observing:
            self._sum()
        self._complete()

    def _sum(self) -> None:
        """Sum the shards over the groups. A worker whose group broke takes no part: it would add garbage."""
        self.works = [Summed(self._shards)] * len(self.buckets)
        if self._shards.collectives.broken:
            return
        self.aside.write(self._numbers[:WIDTH])
        self._numbers[FLAGS:] = torch.tensor([float(s.param.grad is not None) for s in self._trained])
        replicas = self._session.replica_group
        assert self._sync is not None
        self._filled = replicas is not None or self._session.sends_sums
        if self._filled:
            self._fill()
        if replicas is not None:
            self.works = [self._sync(replicas, bucket.flat) for bucket in self.buckets[:-1]]
        self.works = [*self.works[: len(self.buckets) - 1], self._sync(self._group, self._numbers)]

    def _fill(self) -> None:
        for slot, sharded in zip(self._slots, self._trained):
            grad = private.local_of(sharded.param.grad)
            if grad is None:
                slot.view.zero_()
            else:
                slot.view.copy_(grad)
                sharded.param.grad = None  # the memory of the original is free for the next step

    def install(self, keep_stats: bool = True) -> None:
        """The sums become the gradients. A parameter that no worker used has none."""
        self.aside.read(self._numbers[:WIDTH])
        if self._filled:
            users = self._numbers[FLAGS:].tolist()
            for slot, sharded, count in zip(self._slots, self._trained, users):
                local = slot.view.to(sharded.local.device)
                sharded.param.grad = private.like(sharded, local) if count else None

    def renew(self) -> None:
        """What is under way may still write into the buckets: make new ones."""
        super().renew()
        self._fresh_buckets()


def _bucket(run: list[Sharded]) -> Bucket:
    """In host memory: there the sums are made and sent to newcomers."""
    flat = torch.zeros(sum(s.local.numel() for s in run), dtype=run[0].local.dtype)
    parts = flat.split([s.local.numel() for s in run])
    return Bucket(flat, [Slot(s.param, part.view(s.local.shape)) for s, part in zip(run, parts)])
