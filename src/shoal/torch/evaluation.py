"""A loader that splits data over the workers without training: to evaluate with all of them.

A pass has rounds. In each, the workers get their parts, and an exchange ends it. It shows who has done its part; the
parts of workers that died go to the others in the next round. All decide by what the exchange has given them, so they
decide the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, Protocol

from torch.utils.data import DataLoader, IterableDataset

import torch
from shoal.torch.meeting import Meeting
from shoal.torch.order import share
from shoal.torch.reductions import WeightedSum

TASTE = 2
"""Samples for a worker that only runs through the script: a newcomer that rehearses or receives the state."""


class Membership(Protocol):
    """Who shares the data: a `Session`."""

    @property
    def name(self) -> str: ...

    @property
    def members(self) -> tuple[str, ...]: ...

    @property
    def contributors(self) -> tuple[int, ...]: ...

    @property
    def joined(self) -> bool: ...

    @property
    def outside_shoal(self) -> bool: ...

    def is_first_start(self) -> bool: ...

    def set_away(self, away: bool) -> bool: ...


Ranges = list[range]
"""Samples, by their indices."""


def length(samples: Ranges) -> int:
    return sum(len(r) for r in samples)


def slice_of(samples: Ranges, low: int, high: int) -> Ranges:
    """Those from number `low` to number `high`."""
    found, begin = [], 0
    for r in samples:
        part = r[max(0, low - begin) : max(0, high - begin)]
        if len(part):
            found.append(part)
        begin += len(r)
    return found


def split(samples: Ranges, workers: Sequence[str]) -> dict[str, Ranges]:
    """Equal parts, in order; the first ones take the remainder."""
    total = length(samples)
    return {w: slice_of(samples, *share(total, len(workers), i)) for i, w in enumerate(workers)}


def batches_of(samples: Ranges, count: int) -> list[list[int]]:
    """So many batches of equal sizes; the first ones take the remainder."""
    total = length(samples)
    return [
        list(chain.from_iterable(slice_of(samples, *share(total, count, index)))) for index in range(count)
    ]


class EvaluationLoader:
    """Made by `job.eval_loader`. Each pass yields this worker's part in batches.

    If a worker dies during a pass, the others evaluate its part, too, before their pass ends.
    """

    def __init__(
        self,
        session: Membership,
        meeting: Meeting,
        is_sharded: Callable[[], bool],
        dataset: Any,
        batch_size: int,
        **options: Any,
    ) -> None:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            raise ValueError("eval_loader needs a data set with a length: make a list of an IterableDataset")
        for name in ("sampler", "batch_sampler", "shuffle", "drop_last"):
            if options.pop(name, None):
                raise ValueError(f"eval_loader has no {name}: every sample is used once, in order")
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, not {batch_size}")
        self.dataset = dataset
        self._session, self._meeting, self._is_sharded = session, meeting, is_sharded
        self._batch_size, self._options = batch_size, options

    def __len__(self) -> int:
        """Batches of this worker, if no other one dies."""
        if self._only_tastes():
            return len(self._taste())
        return len(self._batches(split([range(len(self.dataset))], self._workers()), fills_up=True))

    def __iter__(self) -> Iterator[Any]:
        """The script keeps what it computes: if a worker dies, all of its parts go to the others."""
        for batch, _, _ in self._pass(lambda: None, None):
            yield batch

    def mean(self, step: Callable[[Any], Any], weight: Callable[[Any], Any] | None = None) -> Any:
        """See `job.evaluate`."""
        if not len(self.dataset):
            raise ValueError("the data set is empty: there is nothing to evaluate")
        mine, total, shown = WeightedSum(), WeightedSum(), WeightedSum()

        def give() -> WeightedSum:
            return mine

        def take(sums: list[WeightedSum]) -> None:
            nonlocal mine
            for found in sums:
                total.add_sum(found)
            mine = WeightedSum()

        with torch.no_grad():
            for batch, _, counts in self._pass(give, take):
                value = step(batch)
                shown.add(value, 1.0)
                if counts:
                    mine.add(value, float(weight(batch)) if weight is not None else counts)
        # A worker whose evaluation does not count has only its own values.
        return (total if total.weight else shown).mean()

    def collect(self, step: Callable[[Any], Any]) -> list[Any]:
        """The values of `step(batch)` of all batches and workers, on every worker, in the order of the data."""
        mine: list[tuple[int, Any]] = []
        found: list[tuple[int, Any]] = []

        def take(lists: list[list[tuple[int, Any]]]) -> None:
            nonlocal mine
            found.extend(chain.from_iterable(lists))
            mine = []

        with torch.no_grad():
            for batch, first, counts in self._pass(lambda: mine, take):
                value = step(batch)
                if counts:
                    mine.append((first, value))
        return [value for _, value in sorted(found, key=lambda pair: pair[0])]

    def _pass(
        self, give: Callable[[], Any], take: Callable[[list[Any]], None] | None
    ) -> Iterator[tuple[Any, int, int]]:
        """Batches, with the index of the first sample and how many of them count.

        `give` is asked for this worker's result of each round, `take` gets those of all. Without `take` the script
        keeps the results, and loses those of all rounds with a worker.
        """
        meeting = self._meeting
        if self._only_tastes():
            yield from self._load(self._taste(), counts=False)
            return
        meeting.evaluated_samples, meeting.evaluators = 0, ()
        before = self._session.set_away(True)
        try:
            todo, workers = [range(len(self.dataset))], self._workers()
            done: dict[str, Ranges] = {}
            while todo:
                parts = split(todo, workers)
                done = {w: [*(done.get(w, []) if take is None else []), *parts[w]] for w in workers}
                meeting.evaluated_samples += length(parts.get(self._me, []))
                batches = self._batches(parts, fills_up=take is not None)
                yield from self._load(batches, counts=bool(parts.get(self._me)))
                found = meeting.exchange(self._end_of_pass, lambda: (self._me, give()))
                if self._only_tastes():
                    return
                if take is not None:
                    take([result for _, result in found])
                there = [worker for worker, _ in found]
                todo = [r for w in workers if w not in there for r in done[w]]
                workers = there
            meeting.evaluators = tuple(workers) if take is None else ()
        finally:
            self._session.set_away(before)

    def _batches(self, parts: dict[str, Ranges], fills_up: bool) -> list[list[int]]:
        """This worker's batches. All workers of a sharded model have the same number of them.

        `fills_up`: with empty batches, if there are not enough samples.
        """
        mine, size = parts.get(self._me), self._batch_size
        if mine is None:
            return self._taste()  # a newcomer that still receives the state has no part
        if not self._is_sharded():
            samples = list(chain.from_iterable(mine))
            return [samples[i : i + size] for i in range(0, len(samples), size)]
        count = -(-max(length(part) for part in parts.values()) // size)
        if not fills_up and min(length(part) for part in parts.values()) < count:
            raise RuntimeError(
                f"{sum(length(p) for p in parts.values())} samples in batches of {size} do not give each of the "
                f"{len(parts)} workers the same number of batches, which a sharded model needs: use "
                "job.evaluate(loader, f), or a larger batch_size"
            )
        return batches_of(mine, count)

    def _taste(self) -> list[list[int]]:
        return [list(range(min(TASTE, len(self.dataset))))]

    def _only_tastes(self) -> bool:
        """Nothing that this worker does now counts."""
        session = self._session
        if session.outside_shoal:
            return False
        if not session.joined and session.is_first_start():
            return False  # before the training each worker is by itself, and evaluates everything
        return self._meeting.is_muted

    def _workers(self) -> list[str]:
        """Newcomers that still receive the state have no part."""
        members = self._session.members
        if not self._session.joined:
            return [self._me]
        return [members[rank] for rank in self._session.contributors if rank < len(members)]

    @property
    def _me(self) -> str:
        return self._session.name

    @property
    def _end_of_pass(self) -> str:
        return f"the end of a pass over the eval_loader of {len(self.dataset)} samples"

    def _load(self, batches: list[list[int]], counts: bool) -> Iterator[tuple[Any, int, int]]:
        """An empty batch has a sample that does not count."""
        loader = DataLoader(self.dataset, batch_sampler=[b or [0] for b in batches], **self._options)
        for indices, batch in zip(batches, loader):
            yield batch, indices[0] if indices else 0, len(indices) if counts else 0
