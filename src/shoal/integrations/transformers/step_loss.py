"""The loss of a step over all workers, from the losses of each one's micro-batches."""

from __future__ import annotations

import torch
from shoal.torch.job import Job


class StepLoss:
    """The Trainer divides a loss by what this worker has in the step: its tokens, or its number of micro-batches."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._shares: list[float] = []
        self._items: float | None = None
        self._sum = 0.0
        self._done = 0

    def begin_step(self, micro_batches: int) -> list[bool]:
        """Returns which of the micro-batches that were just drawn are this worker's, and not only fillers."""
        step = self._job.parts.steps.present
        parts = step.parts[-micro_batches:] if step is not None else []
        self._shares = [part.weight if part.end > part.begin else 0.0 for part in parts]
        self._items, self._sum, self._done = None, 0.0, 0
        return [share > 0 for share in self._shares] or [True] * micro_batches

    def weigh(self, items: float) -> None:
        """The losses are divided by `items`, what this worker has in the step."""
        self._items = items
        self._job.weigh(items)

    def add(self, loss: torch.Tensor) -> float | None:
        """The loss of the next micro-batch. Returns that of the step, once it is complete."""
        if self._done >= len(self._shares):
            return None  # a rehearsal
        share = self._shares[self._done]
        self._done += 1
        if share:
            self._sum += float(loss.detach()) * (share if self._items is None else self._items)
        if self._done < len(self._shares):
            return None
        if self._items is None:
            return float(self._job.sum(self._sum))
        value, items = self._job.sum(torch.tensor([self._sum, self._items], dtype=torch.float64)).tolist()
        return value / items if items else 0.0
