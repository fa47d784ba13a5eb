"""The arithmetic of the data order: permutation, parts of a step, batch rule. Pure.

An epoch has one order of all samples. A step takes the next `batch` of them, whatever the number of workers, and
splits them. So each sample is used exactly once per epoch, and the result does not depend on the number of workers.

Checkpoints contain pickled `Position` and `BatchRule` objects: do not move or rename these classes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(slots=True)
class Position:
    """Where the job is, between two steps."""

    epoch: int = 0
    cursor: int = 0  # samples of this epoch already used
    step: int = 0  # steps done in total


def permutation(length: int, seed: int, epoch: int, shuffle: bool) -> torch.Tensor:
    """The order of epoch `epoch`: the same on every worker and after every restart."""
    if not shuffle:
        return torch.arange(length)
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
    return torch.randperm(length, generator=generator)


def share(size: int, workers: int, rank: int, least: int = 1) -> tuple[int, int]:
    """The part [begin, end) of `size` samples for one of `workers`: equal parts, the first ones take the remainder.

    No part is smaller than `least`, if there are that many samples: the last workers get none instead.
    """
    workers = max(1, min(workers, size // least))
    if rank >= workers:
        return size, size
    each, rest = divmod(size, workers)
    begin = rank * each + min(rank, rest)
    return begin, begin + each + (rank < rest)


@dataclass(frozen=True, slots=True)
class Part:
    """One worker's part of one micro-batch."""

    begin: int  # in the order of the epoch
    end: int
    weight: float  # of its mean gradient in that of the whole batch: its samples / all samples
    last: bool  # the micro-batch that completes the step


def step_parts(
    cursor: int,
    length: int | None,
    batch: int,
    accumulate: int,
    workers: int,
    rank: int | None,
    least: int = 1,
) -> list[Part]:
    """One worker's micro-batches of the step at `cursor`. `rank` None: a newcomer without a part.

    Weights: with mean losses, sum_i (n_i / N) g_i is the gradient of the mean over all N samples, for any split.
    """
    parts = []
    for micro in range(accumulate):
        begin = cursor + micro * batch
        end = begin + batch if length is None else min(begin + batch, length)
        if length is not None and begin >= length:
            break
        a, b = (0, 0) if rank is None else share(end - begin, workers, rank, least)
        parts.append(Part(begin + a, begin + b, (b - a) / (end - begin), False))
    if parts:
        tail = parts[-1]
        parts[-1] = Part(tail.begin, tail.end, tail.weight, True)
    return parts


def step_size(cursor: int, length: int | None, batch: int, accumulate: int) -> int:
    """Samples that the step at `cursor` uses, on all workers together."""
    wanted = batch * accumulate
    return wanted if length is None else min(wanted, length - cursor)


def steps_in_epoch(length: int, batch: int, accumulate: int) -> int:
    return -(-length // (batch * accumulate))


@dataclass(slots=True)
class BatchRule:
    """How the global batch and the learning rate follow the number of workers.

    Without `max_batch_size` the batch is fixed. With it each worker has `batch_size`, up to the limit, and the
    learning rate is multiplied by (batch / batch_size) ("linear", Goyal et al. 2017) or its square root ("sqrt"),
    reached over `warmup_steps` from the factor before.
    """

    batch_size: int
    max_batch_size: int | None = None
    lr_rule: str = "linear"
    warmup_steps: int = 20
    start: float = 1.0  # the factor when the batch changed last
    goal: float = 1.0
    changed_at: int = 0

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, not {self.batch_size}")
        if self.max_batch_size is not None and self.max_batch_size < self.batch_size:
            raise ValueError(f"max_batch_size {self.max_batch_size} is below batch_size {self.batch_size}")
        if self.lr_rule not in ("linear", "sqrt", "none"):
            raise ValueError(f"lr_rule must be 'linear', 'sqrt' or 'none', not {self.lr_rule!r}")

    def batch(self, workers: int) -> int:
        if self.max_batch_size is None:
            return self.batch_size
        return min(self.batch_size * workers, self.max_batch_size)

    def factor(self, workers: int) -> float:
        ratio = self.batch(workers) / self.batch_size
        return {"linear": ratio, "sqrt": math.sqrt(ratio), "none": 1.0}[self.lr_rule]

    def current(self, step: int) -> float:
        """The learning rate's factor at this step."""
        progress = min(1.0, (step - self.changed_at) / self.warmup_steps) if self.warmup_steps > 0 else 1.0
        return self.start + (self.goal - self.start) * progress

    def resize(self, workers: int, step: int) -> str | None:
        """Follow a new number of workers. Returns a note for the log if the learning rate changes."""
        goal = self.factor(workers)
        if goal == self.goal:
            return None
        self.start, self.goal, self.changed_at = self.current(step), goal, step
        return (
            f"step {step}: global batch {self.batch(workers)} with {workers} workers; learning rate x{goal:g} "
            f"by the {self.lr_rule} rule over {self.warmup_steps} steps (from x{self.start:g})"
        )
