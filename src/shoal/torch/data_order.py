"""Where the job is in its data, and which samples this worker gets.

The order of the data belongs to the job: the position, and not the worker, decides who gets which samples. This
object knows positions only; the `Loader` loads the samples.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from shoal.torch.fingerprint import fingerprint
from shoal.torch.order import BatchRule, Part, Position, permutation, step_parts, step_size, steps_in_epoch


class Members(Protocol):
    """Who shares each batch: a `Session`."""

    @property
    def contributors(self) -> tuple[int, ...]:
        """Ranks that get a part of the batch. Newcomers that still receive the state do not."""
        ...

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...


class Source(Protocol):
    """What the samples are loaded from."""

    def available(self, epoch: int, cursor: int, count: int) -> int:
        """How many of the `count` samples from `cursor` on exist."""
        ...

    def peek(self, cursor: int) -> Any:
        """The sample of a stream at `cursor`, if it has been read."""
        ...

    def replan(self) -> None:
        """Discard what was loaded ahead: the parts to come have changed."""
        ...


@dataclass(frozen=True, slots=True)
class Batches:
    """What `job.loader` was asked for."""

    rule: BatchRule
    length: int | None  # None: an IterableDataset
    accumulate: int = 1
    shuffle: bool = True
    drop_last: bool = False
    sums: bool = False  # the loss is a sum, so gradients are added up as they are
    sampler: Callable[[int], list[int]] | None = None  # the indices of an epoch, instead of a permutation


class DataOrder:
    def __init__(self, members: Members, seed: int, note: Callable[[str], None]) -> None:
        self.position = Position()
        self.seed = seed
        self.epochs = 0
        self.least_samples = 1  # of a part
        self._members, self._note = members, note
        #: The global batch since the last resize; None before the first.
        self._batch: int | None = None
        #: What came before `job.loader` was called, as in a script that calls it within `job.epochs`.
        self._early_facts: dict[str, Any] | None = None
        self._resized_early = False
        self._batches: Batches | None = None
        self._source: Source | None = None
        self._following: tuple[int, ...] | None = None
        self._permutation: tuple[int, torch.Tensor] | None = None

    def read(self, batches: Batches, source: Source) -> None:
        self._batches, self._source = batches, source
        if self._early_facts is not None:
            self._adopt_rule(self._early_facts)
        if self._resized_early:
            self.resized()

    @property
    def has_loader(self) -> bool:
        return self._batches is not None

    @property
    def batches(self) -> Batches:
        if self._batches is None:
            raise RuntimeError("call job.loader(...) before training")
        return self._batches

    @property
    def rule(self) -> BatchRule | None:
        return self._batches.rule if self._batches is not None else None

    @property
    def length(self) -> int | None:
        return self._batches.length if self._batches is not None else None

    def signature(self) -> list[str]:
        """A newcomer with other data would train on something else: these lines must be equal."""
        if self._batches is None:
            return []
        b, length = self._batches, "unknown" if self.length is None else self.length
        return [
            f"data set length {length}",
            f"batch size {b.rule.batch_size} (at most {b.rule.max_batch_size}), "
            f"accumulate {b.accumulate}, shuffle {b.shuffle}, seed {self.seed}"
            + (", drop_last" if b.drop_last else "")
            + (", a sampler" if b.sampler else ""),
        ]

    def digest(self) -> bytes:
        """Of what decides the order of the samples in this epoch."""
        order = self.permutation(self.position.epoch) if self.length is not None else None
        return fingerprint((self.signature(), order))

    def digest_of_sample(self) -> bytes:
        """Of the next sample of a stream, which every worker reads by itself."""
        if self.length is not None or self._source is None:
            return fingerprint(None)
        try:
            return fingerprint(self._source.peek(self.position.cursor))
        except Exception:  # it cannot be pickled, and is not compared
            return fingerprint(None)

    # Which samples

    def parts(self) -> list[Part]:
        """This worker's micro-batches of the next step."""
        return self._parts_at(self.position.cursor, self._members.contributors)

    def step_samples(self) -> int:
        """Samples of the next step, on all workers together."""
        return self._samples_at(self.position.cursor, self._members.contributors)

    def exhausted(self) -> bool:
        """Whether the epoch has no samples left."""
        return self.position.cursor >= self._end(self.position.cursor, self.batch_size)

    @property
    def batch_size(self) -> int:
        """Samples of a (micro-)batch, on all workers together."""
        return self.batches.rule.batch(len(self._members.contributors))

    def permutation(self, epoch: int) -> torch.Tensor:
        if self._permutation is None or self._permutation[0] != epoch:
            length, sampler = self.length, self.batches.sampler
            assert length is not None
            if sampler is None:
                order = permutation(length, self.seed, epoch, self.batches.shuffle)
            else:
                order = torch.tensor(sampler(epoch), dtype=torch.int64)
            self._permutation = (epoch, order)
        return self._permutation[1]

    def ahead(self) -> Iterator[tuple[int, Part]]:
        """This worker's parts from here on, with their epochs, if the members stay. Endless."""
        epoch, cursor = self.position.epoch, self.position.cursor
        contributors = self._members.contributors
        following = self._following or contributors
        while True:
            parts = self._parts_at(cursor, contributors)
            for part in parts:
                yield epoch, part
            cursor += self._samples_at(cursor, contributors) if parts else 0
            contributors = following
            if not self._parts_at(cursor, contributors):
                epoch, cursor = epoch + 1, 0

    def _parts_at(self, cursor: int, contributors: tuple[int, ...]) -> list[Part]:
        batch, rank = self.batches.rule.batch(len(contributors)), self._members.rank
        index = contributors.index(rank) if rank in contributors else None
        end = self._end(cursor, batch)
        accumulate = self.batches.accumulate
        return step_parts(cursor, end, batch, accumulate, len(contributors), index, self.least_samples)

    def _samples_at(self, cursor: int, contributors: tuple[int, ...]) -> int:
        batch = self.batches.rule.batch(len(contributors))
        return step_size(cursor, self._end(cursor, batch), batch, self.batches.accumulate)

    def _end(self, cursor: int, batch: int) -> int:
        """Where the epoch's data end, as far as the step at `cursor` needs to know."""
        if self.length is not None:
            end = self.length
        else:
            assert self._source is not None
            wanted = batch * self.batches.accumulate
            end = cursor + self._source.available(self.position.epoch, cursor, wanted)
        return end - max(0, end - cursor) % batch if self.batches.drop_last else end

    # Progress

    def advance(self, samples: int) -> None:
        """A step of so many samples is done."""
        self.position.cursor += samples
        self.position.step += 1

    def next_epoch(self) -> None:
        self.position.epoch, self.position.cursor = self.position.epoch + 1, 0

    def skip_finished_epoch(self) -> None:
        if self.length is not None and self.position.cursor and self.exhausted():
            self.next_epoch()

    def lr_factor(self) -> float:
        """The batch rule's factor of the learning rate at this step."""
        return self.rule.current(self.position.step) if self.rule is not None else 1.0

    def resized(self) -> None:
        """The contributors have changed: batch size and learning rate follow."""
        if self.rule is None:
            self._resized_early = True
            return
        workers, step = len(self._members.contributors), self.position.step
        before, self._batch = self._batch or self.rule.batch_size, self.rule.batch(workers)
        note = self.rule.resize(workers, step)
        if note is None and self._batch != before:
            note = f"step {step}: global batch {self._batch} with {workers} workers; the learning rate is unchanged"
        if note:
            self._note(note)
        self.replan(self._members.contributors)

    def replan(self, following: tuple[int, ...]) -> None:
        """Load other parts ahead: `following` are the contributors from the step after the next one on."""
        self._following = following
        if self._source is not None:
            self._source.replan()

    def place(self) -> str:
        at = self.position
        return f"it stopped in epoch {at.epoch + 1} of {self.epochs}, after {at.step} steps"

    def progress(self) -> dict[str, int]:
        """For reports. Called from the control thread, too."""
        position, workers = self.position, self._members.world_size
        report = {"step": position.step, "epoch": position.epoch, "epochs": self.epochs, "workers": workers}
        if self._batches is None:
            return {**report, "total_steps": 0, "batch_size": 0}
        length, batch = self.length, self.batch_size
        if length is None or not self.epochs:  # nobody knows how often the script reads the data
            return {**report, "total_steps": 0, "batch_size": batch}
        left = max(0, self.epochs - position.epoch - 1) * self._steps_of(length, batch)
        if position.epoch < self.epochs:
            left += self._steps_of(max(0, length - position.cursor), batch)
        return {**report, "total_steps": position.step + left, "batch_size": batch}

    def _steps_of(self, samples: int, batch: int) -> int:
        used = samples - samples % batch if self.batches.drop_last else samples
        return steps_in_epoch(used, batch, self.batches.accumulate)

    # What travels

    def facts(self) -> dict[str, Any]:
        """For newcomers and checkpoints."""
        return {
            "position": replace(self.position),
            "rule": copy.copy(self.rule),
            "batch": self._batch,
            "seed": self.seed,
            "samples": self.length,
        }

    def adopt(self, facts: dict[str, Any]) -> None:
        self.position = replace(facts["position"])
        self._adopt_rule(facts)

    def _adopt_rule(self, facts: dict[str, Any]) -> None:
        theirs, mine = facts["rule"], self.rule
        self._batch = facts.get("batch")
        if mine is None:
            self._early_facts = facts
        elif theirs is not None:
            mine.start, mine.goal, mine.changed_at = theirs.start, theirs.goal, theirs.changed_at

    def restore(self, facts: dict[str, Any], path: str) -> None:
        """Continue from a checkpoint. A position within an epoch has no meaning in other data."""
        self.adopt(facts)
        samples, position = facts["samples"], self.position
        if samples is None or self.length is None or samples == self.length or position.cursor == 0:
            return
        if position.cursor < samples:
            raise RuntimeError(
                f"cannot continue from the checkpoint {path} within epoch {position.epoch}: "
                f"the data set had {samples} samples and has {self.length} now"
            )
        self.next_epoch()
