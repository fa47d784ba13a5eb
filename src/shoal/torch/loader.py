"""The job's loader: yields this worker's part of each batch, in the job's order."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, IterableDataset, default_collate

import torch
from shoal.torch.order import BatchRule, Part, permutation, step_parts, step_size, steps_in_epoch

if TYPE_CHECKING:
    from shoal.torch.job import Job

SHADOW_SAMPLES = 2
"""Samples given to a worker that has no part in a step, so that the script runs; batch norm needs two."""


class Loader:
    def __init__(
        self,
        job: Job,
        dataset: Any,
        rule: BatchRule,
        *,
        accumulate: int,
        shuffle: bool,
        seed: int,
        num_workers: int,
        collate_fn: Callable[[list[Any]], Any] | None,
        **options: Any,
    ) -> None:
        if accumulate < 1:
            raise ValueError(f"accumulate must be at least 1, not {accumulate}")
        self.job, self.dataset, self.rule = job, dataset, rule
        self.accumulate, self.shuffle, self.seed = accumulate, shuffle, seed
        collate = collate_fn or default_collate
        self._source: _Mapped | _Stream
        if isinstance(dataset, IterableDataset):
            if num_workers or options:
                raise ValueError(
                    "an IterableDataset is read in the worker's own process: leave num_workers at 0"
                )
            self.length: int | None = None
            self._source = _Stream(dataset, collate)
        else:
            self.length = len(dataset)
            if self.length < 1:
                raise ValueError("the data set is empty")
            self._source = _Mapped(self, collate, num_workers, options)
        self._order_of: tuple[int, torch.Tensor] | None = None

    def __len__(self) -> int:
        """Batches per epoch and worker at the present number of workers."""
        if self.length is None:
            raise TypeError("an IterableDataset has no length")
        return -(-self.length // self.rule.batch(len(self.job._contributors)))

    def lines(self) -> list[str]:
        """For the job's signature: a newcomer with other data would train on something else."""
        length = "unknown" if self.length is None else self.length
        return [
            f"data set length {length}",
            f"batch size {self.rule.batch_size} (at most {self.rule.max_batch_size}), "
            f"accumulate {self.accumulate}, shuffle {self.shuffle}, seed {self.seed}",
        ]

    def steps_per_epoch(self) -> int:
        if self.length is None:
            return 0
        return steps_in_epoch(self.length, self.rule.batch(len(self.job._contributors)), self.accumulate)

    def order(self, epoch: int) -> torch.Tensor:
        assert self.length is not None
        if self._order_of is None or self._order_of[0] != epoch:
            self._order_of = (epoch, permutation(self.length, self.seed, epoch, self.shuffle))
        return self._order_of[1]

    def parts(self, cursor: int, contributors: tuple[int, ...], rank: int) -> list[Part]:
        batch = self.rule.batch(len(contributors))
        mine = contributors.index(rank) if rank in contributors else None
        end = self._end(cursor, batch)
        return step_parts(cursor, end, batch, self.accumulate, len(contributors), mine, self.job._least)

    def step_samples(self, cursor: int, contributors: tuple[int, ...]) -> int:
        batch = self.rule.batch(len(contributors))
        return step_size(cursor, self._end(cursor, batch), batch, self.accumulate)

    def _end(self, cursor: int, batch: int) -> int:
        """Where the epoch's data end, as far as the step at `cursor` needs to know."""
        if self.length is not None:
            return self.length
        return cursor + self._source.look(self.job.position.epoch, cursor, batch * self.accumulate)

    def changed(self) -> None:
        """The members are others: what was loaded ahead is of the wrong size. Loader processes stay."""
        self._source.replan()

    def __iter__(self) -> Iterator[Any]:
        job = self.job
        if job.rehearsing:
            yield from self._rehearse()
            return
        job._begin_pass(self)
        asked = False
        job._set_away(False)
        try:
            while True:
                job._settle(asked)
                asked = True
                if not job._joined or self._exhausted():
                    return
                job._boundary()
                if not job._joined:
                    return
                yield from self._step()
        finally:
            job._set_away(True)

    def _step(self) -> Iterator[Any]:
        job = self.job
        parts = self.parts(job.position.cursor, job._contributors, job.rank)
        for index, part in enumerate(parts):
            job._open(part, first=index == 0, samples=self._samples(parts))
            began_s = time.perf_counter()
            batch = self._source.fetch(job.position.epoch, part)
            job.meter.input_s += time.perf_counter() - began_s
            yield batch

    def _samples(self, parts: list[Part]) -> int:
        return sum(p.end - p.begin for p in parts)

    def _exhausted(self) -> bool:
        position = self.job.position
        batch = self.rule.batch(len(self.job._contributors))
        return position.cursor >= self._end(position.cursor, batch)

    def _rehearse(self) -> Iterator[Any]:
        """One step on some data, before joining: warms up everything and shows errors while no one waits."""
        size = max(SHADOW_SAMPLES, self.rule.batch_size // 2)
        for _ in range(self.accumulate):
            self.job._open_rehearsal()
            yield self._source.sample(size)


class _Mapped:
    """Batches of a data set with indices, loaded here or by loader processes that outlive every resize."""

    def __init__(
        self, loader: Loader, collate: Callable[..., Any], num_workers: int, options: dict[str, Any]
    ):
        self._loader, self._collate, self._num_workers = loader, collate, num_workers
        self._options = options
        self._feed: Iterator[list[int]] = iter(())
        self._ahead: deque[tuple[int, list[int]]] = deque()
        self._batches: Iterator[Any] | None = None

    def indices(self, epoch: int, part: Part) -> list[int]:
        order = self._loader.order(epoch)
        if part.end > part.begin:
            return order[part.begin : part.end].tolist()
        return order[:SHADOW_SAMPLES].tolist()

    def fetch(self, epoch: int, part: Part) -> Any:
        wanted = self.indices(epoch, part)
        if not self._num_workers:
            return self._load(wanted)
        if self._batches is None:
            self._start()
        assert self._batches is not None
        if self._ahead and (epoch, wanted) not in self._ahead:
            self.replan()  # the script has left a pass before its end
        while True:
            batch = next(self._batches)
            if self._ahead.popleft() == (epoch, wanted):
                return batch

    def sample(self, size: int) -> Any:
        length = len(self._loader.dataset)
        return self._load([i % length for i in range(size)])

    def _load(self, indices: list[int]) -> Any:
        dataset = self._loader.dataset
        if hasattr(dataset, "__getitems__"):
            return self._collate(dataset.__getitems__(indices))
        return self._collate([dataset[i] for i in indices])

    def replan(self) -> None:
        self._feed = self._plan()

    def _start(self) -> None:
        self.replan()
        sampler = _Feed(self)
        self._batches = iter(
            DataLoader(
                self._loader.dataset,
                batch_sampler=sampler,
                num_workers=self._num_workers,
                collate_fn=self._collate,
                persistent_workers=True,
                **self._options,
            )
        )

    def look(self, epoch: int, cursor: int, count: int) -> int:
        return min(count, len(self._loader.dataset) - cursor)

    def next_indices(self) -> list[int]:
        return next(self._feed)

    def _plan(self) -> Iterator[list[int]]:
        """The parts that will be wanted from here on if the members stay."""
        loader, job = self._loader, self._loader.job
        epoch, cursor = job.position.epoch, job.position.cursor
        contributors, rank = job._contributors, job.rank
        after = job._next_contributors if job._final else contributors
        while True:
            parts = loader.parts(cursor, contributors, rank)
            for part in parts:
                wanted = self.indices(epoch, part)
                self._ahead.append((epoch, wanted))
                yield wanted
            cursor += loader.step_samples(cursor, contributors) if parts else 0
            contributors = after
            if cursor >= (loader.length or 0):
                epoch, cursor = epoch + 1, 0


class _Feed:
    """The endless batch sampler of the loader processes."""

    def __init__(self, source: _Mapped) -> None:
        self._source = source

    def __iter__(self) -> Iterator[list[int]]:
        while True:
            yield self._source.next_indices()


class _Stream:
    """An IterableDataset: every worker reads the same stream and keeps its part.

    The stream must be the same each time it is read in one epoch (`set_epoch(epoch)` is called if there is one). To
    let a newcomer start in the middle without reading what came before, give it `skip(count)`.
    """

    def __init__(self, dataset: Any, collate: Callable[..., Any]) -> None:
        self._dataset, self._collate = dataset, collate
        self._epoch = -1
        self._items: Iterator[Any] = iter(())
        self._begin = 0  # where `_held` begins in the stream
        self._held: list[Any] = []  # the samples of the present step, of all workers
        self._first: list[Any] = []

    def look(self, epoch: int, cursor: int, count: int) -> int:
        """Have the samples [cursor, cursor + count) at hand; how many there are before the stream ends."""
        if epoch != self._epoch or cursor < self._begin:
            self._open(epoch, cursor)
        while self._begin < cursor:
            known = self._held[: cursor - self._begin] or list(
                itertools.islice(self._items, cursor - self._begin)
            )
            if not known:
                return 0
            self._begin, self._held = self._begin + len(known), self._held[len(known) :]
        self._held += itertools.islice(self._items, max(0, count - len(self._held)))
        return min(count, len(self._held))

    def _open(self, epoch: int, cursor: int) -> None:
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(epoch)
        skips = cursor and hasattr(self._dataset, "skip")
        self._items = iter(self._dataset.skip(cursor) if skips else self._dataset)
        self._epoch, self._begin, self._held = epoch, cursor if skips else 0, []

    def fetch(self, epoch: int, part: Part) -> Any:
        items = self._held[part.begin - self._begin : part.end - self._begin]
        return self._collate(items) if items else self.sample(SHADOW_SAMPLES)

    def sample(self, size: int) -> Any:
        if not self._first:
            self._first = list(itertools.islice(iter(self._dataset), size))
        return self._collate((self._first * size)[:size])

    def replan(self) -> None:
        return
