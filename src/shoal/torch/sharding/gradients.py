"""The gradients of a sharded model: torch scatters their sums to the owners of the rows while backward continues.

It has the interface of `shoal.torch.gradients.GradientBuckets`. Each worker's gradients are weighted by its share of
the batch before they are summed. When a worker dies, all collectives of the step end without a result, the rest of the
loop's body runs, and the step is done again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from shoal.torch.aside import WIDTH, Aside
from shoal.torch.gradients import Sync
from shoal.torch.sharding import private
from shoal.torch.sharding.private import Sharded
from shoal.torch.sharding.shards import Shards
from shoal.torch.sharding.together import Point, Together
from torch import Tensor


class Summed:
    """The work of all sums of a step: done, or broken."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards

    def wait(self, timeout: Any = None) -> bool:
        if self._shards.collectives.broken:
            raise RuntimeError("a worker was lost")
        return True

    def is_completed(self) -> bool:
        return True


@dataclass(slots=True)
class NoBucket:
    flat: Tensor = field(default_factory=lambda: torch.empty(0))


class ShardGradients:
    def __init__(
        self,
        shards: Shards,
        together: Together,
        complete: Callable[[], None],
        part_complete: Callable[[], None],
    ) -> None:
        self._shards, self._together = shards, together
        self._complete, self._part_complete = complete, part_complete
        self.aside = Aside()
        self._numbers = torch.zeros(WIDTH)
        self.works: list[Any] = [Summed(shards)]
        self.buckets = [NoBucket()]
        self.good: Any = None
        self.good_on_host = None
        self._frozen = [s for s in shards.all() if not s.param.requires_grad]
        self._weight, self._first, self._last = 1.0, True, True
        self._armed = self._closed = self._queued = False
        private.use(shards.model, self._gather, self._scatter, self._reduced)
        shards.model.register_forward_pre_hook(self._before_forward, prepend=True)
        shards.model.register_forward_hook(self._after_forward)

    # torch's collectives

    def _gather(self, output: Tensor, part: Tensor) -> None:
        self._shards.collectives.all_gather(output, part)

    def _scatter(self, output: Tensor, whole: Tensor) -> None:
        if self._weight == 0.0:  # the gradient of a worker without a part may be NaN, and 0 x NaN is NaN
            whole.zero_()
        elif self._weight != 1.0:
            whole.mul_(self._weight)
        self._shards.collectives.reduce_scatter(output, whole)

    def _reduced(self, layer: int, part: Tensor) -> None:
        if self._closed:
            raise RuntimeError(
                "backward() was called twice for one batch: add the losses up and call it once"
            )
        if self._armed and not self._queued:
            if self._first and self.aside.amount is not None:
                self._check_empty([s for s in self._shards.all() if s.param.requires_grad])
            self._queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_of_backward)

    def _end_of_backward(self) -> None:
        if not self._armed:
            return
        self._armed, self._closed = False, True
        if not self._last:
            self._part_complete()
            return
        self.aside.write(self._numbers)
        if self._shards.collectives.size > 1:
            self._shards.collectives.all_reduce(self._numbers)  # if it broke, the vote does not take place
        self._complete()

    def _check_empty(self, trained: list[Sharded]) -> None:
        """torch adds to gradients that are still there, and they are sums of the whole step already."""
        kept = [s.param.grad for s in trained if s.param.grad is not None]
        if kept and any(bool(private.local_of(grad).any()) for grad in kept):
            raise RuntimeError(
                "the gradients of the last step are still there: call optimizer.zero_grad() in each"
            )

    # All workers must run the model together

    def _before_forward(self, module: Any, args: Any) -> None:
        """An evaluation: a worker alone would wait for the others, or take their layers for its own."""
        if not self._armed and not self._closed and self._shards.collectives.size > 1:
            self._together.meet(Point.EVALUATION)

    def _after_forward(self, module: Any, args: Any, output: Any) -> None:
        """An evaluation that broke must not return numbers that are wrong. A step that broke is done again."""
        evaluates = not self._armed and not self._closed and not self._shards.collectives.muted
        if evaluates and self._shards.collectives.broken:
            self._evaluation_broke()

    def _evaluation_broke(self) -> None:
        raise RuntimeError(
            "a worker was lost while the sharded model was evaluated, and its rows with it: "
            "start the job again from its last checkpoint (--max-restarts does it by itself)"
        )

    # The interface of GradientBuckets

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
        self._weight, self._first, self._last = weight, first, last
        self._armed, self._closed, self._queued = True, False, False
        if first:
            self._together.step_begins()

    def reweigh(self, weight: float, earlier: float | None = 1.0) -> None:
        self._weight = weight

    def disarm(self) -> None:
        self._armed = self._closed = False
        self._weight = 1.0

    def install(self, keep_stats: bool = True) -> None:
        """The sums are the gradients of the sharded parameters already."""
        self.aside.read(self._numbers)

    def scale(self) -> None:
        """Divide the sums by what all workers' gradients count together."""
        if self.aside.total:
            for sharded in self._shards.all():
                if sharded.param.grad is not None:
                    private.local_of(sharded.param.grad).div_(self.aside.total)
            self.aside.total = 0.0

    def restart(self) -> None:
        """The workers have changed."""
        self._together.restart()
        self._armed = self._closed = self._queued = False

    def renew(self) -> None:
        for sharded in self._shards.all():
            sharded.param.grad = None

    def keep_stats(self) -> None:
        """Batch norm is refused, so there are no statistics."""

    restore_stats = keep_stats

    def check_frozen(self) -> None:
        """As in a replicated model: torch decides once which gradients it sums."""
        if any(s.param.requires_grad for s in self._frozen):
            raise RuntimeError(
                "a frozen parameter was unfrozen after job.shard(): let it require gradients there, "
                "and keep its learning rate at 0 until it is wanted"
            )
