"""The workers of a sharded model must be at the same point of the script: each waits for the rows of the others.

So they meet before each point at which they use collectives: an all-reduce of one number says where each of them is. If
they are at different points, all get an error. Without it one would wait for good, or gloo would end the process.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from shoal.torch.sharding.shards import Shards

COUNT_BITS = 12  # for the number of workers that want a checkpoint


class Point(IntEnum):
    EVALUATION = 1
    #: `job.mean` and the like, and the end of a pass over an evaluation loader.
    EXCHANGE = 2
    END = 3
    #: Between two steps. The number of steps is added.
    STEP = 1 << 16


APART = (
    "the workers do not run the sharded model together: every worker must run it for an evaluation, with the same "
    "number of batches (job.evaluate does it), and not only the one with job.is_main. All must call job.mean, job.any "
    "and the like at the same point, and leave their loops together: if job.any(flag): break"
)


class Together:
    def __init__(self, shards: Shards) -> None:
        self._shards = shards
        self._steps = 0  # begun since the workers have changed
        self._just_met = True
        #: A checkpoint is wanted: by the script, the interval or the coordinator.
        self.wants_checkpoint = False

    def restart(self) -> None:
        """The workers have changed: all of them count from here.

        Some come to a boundary before their next step (a newcomer; a step that is done again), the others are in one.
        """
        self._steps, self._just_met = 0, True

    def step_begins(self) -> None:
        self._steps, self._just_met = self._steps + 1, False

    def at_boundary(self) -> bool:
        """Between two steps. Returns whether a worker wants a checkpoint."""
        if self._just_met and self._shards.collectives.size > 1:
            return False
        return self.meet(Point.STEP + self._steps)

    def at_exchange(self) -> None:
        self.meet(Point.EXCHANGE)

    def at_end(self) -> bool:
        """The training is over. Returns whether a worker wants a checkpoint."""
        return self.meet(Point.END)

    def meet(self, point: int) -> bool:
        """Returns whether a worker wants a checkpoint; False if it broke."""
        group = self._shards.collectives
        total = torch.tensor([(int(point) << COUNT_BITS) + self.wants_checkpoint])
        if group.size == 1:
            return self.wants_checkpoint
        if not group.all_reduce(total):
            return False
        if int(total) >> COUNT_BITS != group.size * point:
            raise RuntimeError(APART)
        return bool(int(total) & ((1 << COUNT_BITS) - 1))
