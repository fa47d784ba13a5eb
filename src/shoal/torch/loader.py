"""The job's loader: yields this worker's part of each batch, in the job's order."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch.utils.data import DataLoader, IterableDataset, default_collate

from shoal.torch.data_order import Batches, DataOrder
from shoal.torch.meter import Meter
from shoal.torch.order import BatchRule, Part
from shoal.torch.samplers import SeededSampler
from shoal.torch.shapes import mark_batch_dynamic
from shoal.torch.sum_losses import refusing_sums

SHADOW_SAMPLES = 2
"""Samples for a worker that has no part in a step, so that the script runs. Batch norm needs two."""

Collate = Callable[[list[Any]], Any]
Weigh = Callable[[Any], Any]
"""What a batch counts: the number of its tokens, for example."""


REFUSED = {
    "batch_sampler": "give a sampler, and batch_size for all workers together",
    "in_order": "batches always come in the order of the job",
    "generator": "the order follows shoal.init(seed=...)",
}


def check_options(options: dict[str, Any]) -> None:
    """Refuse options of DataLoader that make no sense here, and drop those that say what happens anyway."""
    for name, advice in REFUSED.items():
        if options.pop(name, None) is not None:
            raise ValueError(f"job.loader() has no {name}: {advice}")
    if options.pop("persistent_workers", None) is False:
        raise ValueError(
            "persistent_workers=False is not possible: loader processes live as long as their worker. "
            "Leave it out, and define set_epoch(epoch) in a sampler for what differs between epochs"
        )


class Driver(Protocol):
    """What happens between the batches: a `Loop`."""

    @property
    def rehearsing(self) -> bool: ...

    def begin_pass(self) -> None: ...

    def check_pass(self) -> None:
        """After the last batch of a pass, which the script has not left."""
        ...

    def end_pass(self) -> None: ...

    def settle(self, asked: bool) -> bool:
        """End the present step. False: this worker has left its generation, the pass is over."""
        ...

    def boundary(self) -> bool:
        """Change the members, if that is agreed. False as for `settle`."""
        ...

    def open_step(self, part: Part, first: bool, samples: int) -> None: ...

    def open_rehearsal(self) -> None: ...

    def weigh_part(self, amount: float) -> None: ...

    @property
    def weighs(self) -> bool:
        """Whether the script says what its losses count."""
        ...


class Loader:
    def __init__(
        self,
        driver: Driver,
        order: DataOrder,
        meter: Meter,
        dataset: Any,
        rule: BatchRule,
        *,
        accumulate: int = 1,
        shuffle: bool = True,
        drop_last: bool = False,
        sampler: Any = None,
        loss: str | None = None,
        weight: Weigh | None = None,
        num_workers: int = 0,
        collate_fn: Collate | None = None,
        resizes: bool = True,
        **options: Any,
    ) -> None:
        if accumulate < 1:
            raise ValueError(f"accumulate must be at least 1, not {accumulate}")
        if loss not in (None, "mean", "sum"):
            raise ValueError(f"loss must be 'mean' or 'sum', not {loss!r}")
        self.dataset, self.rule, self.accumulate = dataset, rule, accumulate
        self._driver, self._order, self._meter = driver, order, meter
        self._weigh, self._resizes = weight, resizes
        self._checks_loss = loss is None and resizes
        self._checked: set[bool] = (
            set()
        )  # whether the worker had all samples of a batch whose loss was looked at
        collate = collate_fn or default_collate
        indices = SeededSampler(sampler, order.seed) if sampler is not None else None
        self._source: _Mapped | _Stream
        self.length: int | None = None
        if isinstance(dataset, IterableDataset):
            if num_workers or options:
                raise ValueError(
                    "an IterableDataset is read in the worker's own process: leave num_workers at 0"
                )
            if sampler is not None:
                raise ValueError("an IterableDataset has its own order: leave out the sampler")
            self._source = _Stream(dataset, collate)
        else:
            self.length = len(dataset) if sampler is None else len(sampler)
            if self.length < 1:
                raise ValueError("the data set is empty" if sampler is None else "the sampler is empty")
            if drop_last and self.length < (rule.max_batch_size or rule.batch_size):
                raise ValueError(f"drop_last leaves nothing of {self.length} samples: choose a smaller batch")
            self._source = _Mapped(dataset, order, collate, num_workers, options)
        order.read(
            Batches(rule, self.length, accumulate, shuffle, drop_last, loss == "sum", indices), self._source
        )

    def __len__(self) -> int:
        """Batches per epoch and worker at the present number of workers."""
        if self.length is None:
            raise TypeError("an IterableDataset has no length")
        batch = self._order.batch_size
        return self.length // batch if self._order.batches.drop_last else -(-self.length // batch)

    def __iter__(self) -> Iterator[Any]:
        driver = self._driver
        if driver.rehearsing:
            yield from self._rehearse()
            return
        driver.begin_pass()
        asked = False
        try:
            while driver.settle(asked) and not self._order.exhausted() and driver.boundary():
                asked = True
                yield from self._step()
            driver.check_pass()
        finally:
            driver.end_pass()

    def _step(self) -> Iterator[Any]:
        parts = self._order.parts()
        samples = sum(p.end - p.begin for p in parts)
        for index, part in enumerate(parts):
            self._driver.open_step(part, index == 0, samples)
            began_s = time.perf_counter()
            batch = self._source.fetch(self._order.position.epoch, part)
            self._meter.input_s += time.perf_counter() - began_s
            if self._weigh is not None:
                self._driver.weigh_part(float(self._weigh(batch)))
            if self._resizes:
                mark_batch_dynamic(batch)
            with self._refusing_sums(has_all=part.weight == 1.0):
                yield batch

    def _refusing_sums(self, has_all: bool) -> AbstractContextManager[None]:
        """A sum that is divided by the size of the batch is a mean only where one worker has all of it."""
        checks = self._checks_loss and has_all not in self._checked
        self._checked.add(has_all)

        def wholes() -> frozenset[int]:
            if has_all or self._driver.weighs:
                return frozenset()  # what the script divides by is its own affair
            return frozenset(
                size * k
                for size in (self.rule.batch_size, self._order.batch_size)
                for k in (1, self.accumulate)
            )

        return refusing_sums(checks, wholes)

    def _rehearse(self) -> Iterator[Any]:
        """One step on some samples before joining: it warms everything up, and errors show while nobody waits."""
        size = max(SHADOW_SAMPLES, self.rule.batch_size // 2)
        for _ in range(self.accumulate):
            self._driver.open_rehearsal()
            batch = self._source.sample(size)
            mark_batch_dynamic(batch)
            yield batch


class _Mapped:
    """Batches of a data set with indices, loaded here or by loader processes that outlive every resize."""

    def __init__(
        self, dataset: Any, order: DataOrder, collate: Collate, num_workers: int, options: dict[str, Any]
    ) -> None:
        self._dataset, self._order, self._collate = dataset, order, collate
        self._num_workers, self._options = num_workers, options
        self._feed: Iterator[list[int]] = iter(())
        self._ahead: deque[tuple[int, list[int]]] = deque()
        self._batches: Iterator[Any] | None = None

    def fetch(self, epoch: int, part: Part) -> Any:
        wanted = self._indices(epoch, part)
        if not self._num_workers:
            return self._load(wanted)
        if self._batches is None:
            self._batches = self._start()
        if self._ahead and (epoch, wanted) not in self._ahead:
            self.replan()  # the script has left a pass before its end
        while True:
            batch = next(self._batches)
            if self._ahead.popleft() == (epoch, wanted):
                return batch

    def sample(self, size: int) -> Any:
        length = len(self._dataset)
        return self._load([i % length for i in range(size)])

    def available(self, epoch: int, cursor: int, count: int) -> int:
        return max(0, min(count, len(self._dataset) - cursor))

    def peek(self, cursor: int) -> None:
        """The order of the indices is compared instead."""

    def replan(self) -> None:
        self._feed = self._plan()

    def next_indices(self) -> list[int]:
        return next(self._feed)

    def _indices(self, epoch: int, part: Part) -> list[int]:
        order = self._order.permutation(epoch)
        chosen = order[part.begin : part.end] if part.end > part.begin else order[:SHADOW_SAMPLES]
        return [int(i) for i in chosen.tolist()]

    def _plan(self) -> Iterator[list[int]]:
        for epoch, part in self._order.ahead():
            wanted = self._indices(epoch, part)
            self._ahead.append((epoch, wanted))
            yield wanted

    def _load(self, indices: list[int]) -> Any:
        if hasattr(self._dataset, "__getitems__"):
            return self._collate(self._dataset.__getitems__(indices))
        return self._collate([self._dataset[i] for i in indices])

    def _start(self) -> Iterator[Any]:
        self.replan()
        loader = DataLoader(
            self._dataset,
            batch_sampler=_Feed(self),
            num_workers=self._num_workers,
            collate_fn=self._collate,
            persistent_workers=True,
            **self._options,
        )
        return iter(loader)


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
    let a newcomer start in the middle without reading all samples before, give it `skip(count)`.
    """

    def __init__(self, dataset: Any, collate: Collate) -> None:
        self._dataset, self._collate = dataset, collate
        self._epoch = -1
        self._items: Iterator[Any] = iter(())
        self._begin = 0  # where `_held` begins in the stream
        self._held: list[Any] = []  # the samples of the present step, of all workers
        self._first: list[Any] = []

    def available(self, epoch: int, cursor: int, count: int) -> int:
        """Read the samples [cursor, cursor + count); return how many there are before the stream ends."""
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

    def peek(self, cursor: int) -> Any:
        at = cursor - self._begin
        return self._held[at] if 0 <= at < len(self._held) else None

    def replan(self) -> None:
        """Nothing is read ahead."""
