"""A loader that splits data over the workers without training: to evaluate with all of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from torch.utils.data import DataLoader, IterableDataset, Subset

from shoal.torch.meeting import Meeting
from shoal.torch.order import share

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
    def partial(self) -> bool: ...

    @property
    def joined(self) -> bool: ...

    @property
    def outside_shoal(self) -> bool: ...

    def is_first_start(self) -> bool: ...

    def set_away(self, away: bool) -> bool: ...


@dataclass(frozen=True, slots=True)
class Span:
    """Samples [begin, end) for one worker."""

    worker: str
    begin: int
    end: int


def split(begin: int, end: int, workers: list[str]) -> list[Span]:
    """Equal parts, in order; the first ones take the remainder."""
    spans = []
    for index, worker in enumerate(workers):
        low, high = share(end - begin, len(workers), index)
        spans.append(Span(worker, begin + low, begin + high))
    return spans


class EvaluationLoader:
    """Made by `job.eval_loader`. Each pass yields this worker's part in batches.

    If a worker dies during a pass, the others evaluate its part, too, before their pass ends.
    """

    def __init__(
        self, session: Membership, meeting: Meeting, dataset: Any, batch_size: int, **options: Any
    ) -> None:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            raise ValueError("eval_loader needs a data set with a length: make a list of an IterableDataset")
        for name in ("sampler", "batch_sampler", "shuffle", "drop_last"):
            if options.pop(name, None):
                raise ValueError(f"eval_loader has no {name}: every sample is used once, in order")
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, not {batch_size}")
        self.dataset = dataset
        self._session, self._meeting = session, meeting
        self._batch_size, self._options = batch_size, options

    def __len__(self) -> int:
        """Batches of this worker, if no other one dies."""
        return sum(-(-(s.end - s.begin) // self._batch_size) for s in self._mine(self._spans()))

    def __iter__(self) -> Iterator[Any]:
        if self._only_tastes():
            yield from self._load(0, min(TASTE, len(self.dataset)))
            return
        self._meeting.evaluated_samples = 0
        before = self._session.set_away(True)
        try:
            yield from self._all_parts()
        finally:
            self._session.set_away(before)

    def _all_parts(self) -> Iterator[Any]:
        spans = self._spans()
        lost = spans
        while lost:
            for span in self._mine(lost):
                self._meeting.evaluated_samples = (
                    (self._meeting.evaluated_samples or 0) + span.end - span.begin
                )
                yield from self._load(span.begin, span.end)
            self._meeting.exchange(lambda: None)  # all are done, or the workers that died are known now
            if self._only_tastes():
                return
            members = list(self._workers())
            gone = [s for s in spans if s.worker not in members]
            spans = [s for s in spans if s.worker in members]
            lost = [part for s in gone for part in split(s.begin, s.end, members) if part.end > part.begin]
            spans += lost

    def _only_tastes(self) -> bool:
        session = self._session
        if session.outside_shoal:
            return False
        if not session.joined and session.is_first_start():
            return False  # before the training each worker is by itself, and evaluates everything
        return session.partial or self._meeting.is_muted

    def _workers(self) -> list[str]:
        """Newcomers that still receive the state have no part."""
        members = self._session.members
        if not self._session.joined:
            return [self._me]
        return [members[rank] for rank in self._session.contributors if rank < len(members)]

    def _spans(self) -> list[Span]:
        return split(0, len(self.dataset), self._workers())

    def _mine(self, spans: list[Span]) -> list[Span]:
        return [s for s in spans if s.worker == self._me and s.end > s.begin]

    @property
    def _me(self) -> str:
        return self._session.members[0] if self._session.outside_shoal else self._session.name

    def _load(self, begin: int, end: int) -> Iterator[Any]:
        part = Subset(self.dataset, range(begin, end))
        yield from DataLoader(part, batch_size=self._batch_size, **self._options)
