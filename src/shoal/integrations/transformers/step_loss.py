"""The loss of a step over all workers, from the losses of each one's micro-batches."""

from __future__ import annotations

import torch
from shoal.torch.job import Job


class StepLoss:
    """The Trainer divides a loss by what this worker has in the step: its tokens, or its number of micro-batches."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._shares: list[float] = []  # what the loss of each micro-batch counts
        self._items: float | None = None  # the losses of all workers are divided by the sum of these
        self._factors: list[float] = []
        self._sum = 0.0
        self._done = 0

    def begin_step(self, micro_batches: int) -> list[bool]:
        """Returns which of the micro-batches that were just drawn are this worker's, and not only fillers."""
        step = self._job.parts.steps.present
        parts = step.parts[-micro_batches:] if step is not None else []
        self._shares = [part.weight if part.end > part.begin else 0.0 for part in parts]
        self._factors = [1.0] * micro_batches
        self._items, self._sum, self._done = None, 0.0, 0
        return [share > 0 for share in self._shares] or [True] * micro_batches

    def weigh(self, items: float) -> None:
        """The losses are divided by `items`, what this worker has in the step."""
        self._items = items
        self._shares = [items if share else 0.0 for share in self._shares]
        self._job.weigh(items)

    def weigh_means(self, items: list[float]) -> None:
        """The loss of each micro-batch is a mean over this many items, of which other workers have more."""
        if len(items) == 1:
            self.weigh(items[0])
            return
        here = float(any(self._shares))
        workers, *totals = self._job.sum(torch.tensor([here, *items], dtype=torch.float64)).tolist()
        self._factors = [
            workers * mine / total if total else 0.0 for mine, total in zip(items, totals, strict=True)
        ]
        self._items = here
        self._shares = [float(factor > 0) for factor in self._factors]
        self._job.weigh(here)

    @property
    def factor(self) -> float:
        """By what the loss of the next micro-batch has to be multiplied."""
        return self._factors[self._done] if self._done < len(self._factors) else 1.0

    def add(self, loss: torch.Tensor) -> float | None:
        """The loss of the next micro-batch. Returns that of the step, once it is complete."""
        if self._done >= len(self._shares):
            return None  # a rehearsal
        share = self._shares[self._done]
        self._done += 1
        if share:  # the mean over no items is NaN
            self._sum += float(loss.detach()) * share
        if self._done < len(self._shares):
            return None
        if self._items is None:
            return float(self._job.sum(self._sum))
        value, items = self._job.sum(torch.tensor([self._sum, self._items], dtype=torch.float64)).tolist()
        return value / items if items else 0.0
