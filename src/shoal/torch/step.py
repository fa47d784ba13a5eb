"""One training step: gradients, the vote, the optimizer step, and what becomes of a step that breaks."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any, Protocol

import torch
from shoal.torch.data_order import DataOrder
from shoal.torch.gradients import Sync
from shoal.torch.handover import Handover
from shoal.torch.meter import Meter
from shoal.torch.order import Part, Position
from shoal.torch.replica import Replica
from shoal.torch.vote import Vote


class StepKind(Enum):
    REAL = auto()
    #: A newcomer runs one step before it joins. Nothing of it counts.
    REHEARSAL = auto()
    #: A newcomer contributes nothing; it receives state and applies the others' gradients to it.
    CATCH_UP = auto()
    #: The synchronization broke. The rest of the loop's body runs, and then the step is done again.
    VOID = auto()


@dataclass(slots=True)
class Step:
    kind: StepKind
    part: Part
    samples: int  # of this worker
    began_s: float
    size: int = 0  # samples of all workers, by which the job advances, even if the members change within it
    synced: bool = False
    stepped: bool = False  # the optimizer step is applied
    counted: bool = False  # the recovery has counted it already
    resized: bool = False  # the members changed within it: batch and learning rate follow after it
    undo: bytes | None = None  # `job.state` and learning rates at the break


class Outcome(Enum):
    """How the synchronization of a step ended."""

    DONE = auto()
    HELD = auto()  # it broke, and this worker holds the complete gradients
    LOST = auto()  # it broke without them


class Membership(Protocol):
    """What a step needs of the membership: a `Session`."""

    @property
    def generation(self) -> int: ...

    @property
    def retreated(self) -> bool: ...

    @property
    def on_gpu(self) -> bool: ...

    @property
    def data_group(self) -> Any: ...

    @property
    def vote_group(self) -> Any: ...

    def summing(self, sync: Sync) -> tuple[Any, Sync]: ...

    def arrived(self, step: int) -> None: ...

    def wait(self, work: Any) -> bool: ...


class Steps:
    """The present step. The training thread calls `open`, `synchronize`, `optimizer_step`, `settle` in this order."""

    def __init__(
        self,
        session: Membership,
        replica: Replica,
        order: DataOrder,
        handover: Handover,
        vote: Vote,
        meter: Meter,
        sync: Sync,
    ) -> None:
        self._session, self._replica, self._order = session, replica, order
        self._handover, self._vote, self._meter = handover, vote, meter
        self.sync = sync
        self.present: Step | None = None
        #: Whether the optimizer step of the last step was applied: not between two micro-batches.
        self.stepped = True
        self.rehearsing = False

    @property
    def counts(self) -> bool:
        """Whether what the script does now is part of the job's training."""
        real = self.present is None or self.present.kind is StepKind.REAL
        return real and not self.rehearsing and not self._session.retreated

    @property
    def weight(self) -> float:
        """This worker's share of the present batch."""
        return self.present.part.weight if self.present is not None and self.counts else 0.0

    @property
    def is_last_micro_batch(self) -> bool:
        return self.present is None or self.present.part.last

    @property
    def position(self) -> Position:
        """Where the job is, with the present step if its optimizer step is applied."""
        position, step = replace(self._order.position), self.present
        if step is not None and step.stepped and step.kind is StepKind.REAL:
            position.cursor, position.step = position.cursor + step.size, position.step + 1
        return position

    # Opening

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        self.rehearsing = True
        try:
            yield
        finally:
            self.rehearsing, self.present = False, None

    def open_rehearsal(self) -> None:
        self.present = Step(StepKind.REHEARSAL, Part(0, 0, 0.0, True), 0, time.perf_counter())

    def open(self, part: Part, first: bool, samples: int) -> None:
        """Before the script gets a batch. `first`: of the step's micro-batches."""
        if first:
            kind = StepKind.CATCH_UP if self._handover.catching_up else StepKind.REAL
            self.present = Step(kind, part, samples, time.perf_counter(), self._order.step_samples())
        step, buckets = self._present(), self._replica.buckets
        step.part = part
        if buckets is None:
            return
        if self._session.data_group is None:
            buckets.disarm()
            buckets.good = None  # a single member never does a step again
        elif step.kind is StepKind.CATCH_UP:
            if (
                not self._vote.is_cast_early
            ):  # before the first micro-batch: the others do not wait for the last
                self.observe(self._session.data_group, self._session.vote_group, self._session.generation)
            if part.last:
                buckets.watch()
            else:
                buckets.disarm()
        else:
            group, sync = self._session.summing(self.sync)
            buckets.arm(group, sync, part.weight, first, part.last)

    def observe(self, data_group: Any, vote_group: Any, generation: int) -> None:
        """For a newcomer: take part in a step with nothing. It votes at once, and on GPUs it adds zeros.

        So nobody waits for this worker: neither for its run through the script nor for the state it receives.
        """
        buckets = self._replica.buckets
        assert buckets is not None
        if self._vote.is_cast_early:
            buckets.renew()  # the sums of a dropped plan may still be written into their memory
        if self._session.on_gpu:
            buckets.observe(data_group, self.sync)
        self._vote.cast_early(vote_group, generation)

    def stop_observing(self) -> None:
        """The plan in whose step this worker took part was dropped."""
        if self._vote.is_cast_early and self._replica.buckets is not None:
            self._replica.buckets.renew()
            self._vote.discard()

    # Backward

    def synchronize(self) -> Outcome:
        """At the end of backward, when all buckets are being summed: wait for them, then vote."""
        step, buckets, handover = self._present(), self._replica.buckets, self._handover
        assert buckets is not None
        catching_up = step.kind is StepKind.CATCH_UP
        self._session.arrived(self._order.position.step + 1)
        handover.backward_ended()
        received = handover.take_window() if catching_up else True
        summed = True
        # Every one: what is under way would write into the buckets later.
        for work, bucket in zip(buckets.works, buckets.buckets):
            summed = self._session.wait(work) and summed
            if summed:
                handover.sending.give(bucket.flat)
        voted = False
        if catching_up:
            tally = self._vote.take_early()
            voted = summed and tally()
        elif summed:
            voted = self._vote.cast(handover.rest_fits)
        if voted:
            handover.rest_fits_next = self._vote.rest_fits
        holds = summed and received
        if not (holds and voted):
            return Outcome.HELD if holds else Outcome.LOST
        step.synced = True
        buckets.install()
        handover.wait_read()
        return Outcome.DONE

    # The optimizer

    def optimizer_step(
        self, optimizer: torch.optim.Optimizer, original: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """The script's `optimizer.step()`; `original` is the optimizer's own."""
        if any(argument is not None for argument in (*args[:1], kwargs.get("closure"))):
            raise RuntimeError(
                "optimizer.step(closure) is not supported: call backward() before it, and step() without one"
            )
        step = self.present
        if step is None or step.kind is StepKind.REHEARSAL:
            return original(*args, **kwargs)
        if step.kind is StepKind.VOID:
            return None
        self._handover.close_window(stepping=True)
        with self._handover.partial_step(), scaled_rates(optimizer, self._order.lr_factor()):
            result = original(*args, **kwargs)
        step.stepped = True
        if self._replica.buckets is not None:
            self._replica.buckets.disarm()  # further backward passes are the script's own
        return result

    # The end

    def settle(self, asked: bool) -> Step | None:
        """The loop's body has run. Returns the step if it counts. `asked`: the script wants another batch."""
        step, self.present = self.present, None
        if step is None:
            return None
        if self._replica.buckets is not None:
            self._replica.buckets.disarm()
        if step.kind is StepKind.VOID:
            self._undo(step)
            return None
        if self._session.data_group is not None and not step.synced:
            if asked:
                raise RuntimeError(
                    "the loop's body must call backward() for every batch, the others wait for it: "
                    "to leave one out, multiply its loss by 0"
                )
            return None  # the script has left its loop before this step
        self._handover.close_window(stepping=False)
        self._order.advance(step.size)
        self.stepped = step.stepped
        if step.kind is StepKind.REAL:
            self._meter.step_done(step.samples, step.began_s)
        return step

    def broke(self) -> None:
        """The generation broke: keep what a step done again starts from."""
        self._vote.discard()
        if self.present is not None:
            kept = self._replica.box.capture(), self._replica.state.groups()
            self.present.undo = pickle.dumps(kept)

    def recover(self, apply: bool) -> bool:
        """In the generation of the survivors: `apply` the gradients held, or do the present step again.

        Returns whether batch size and learning rate follow now; otherwise they do after the present step.
        """
        step, buckets = self.present, self._replica.buckets
        if step is not None and apply:
            assert buckets is not None
            buckets.install()
            step.synced = step.counted = step.resized = True
            step.kind = StepKind.REAL
        elif step is not None:
            step.kind = StepKind.VOID
        if buckets is not None and not apply:
            buckets.renew()
            buckets.restore_stats()
        return step is None or not step.resized

    def retreat(self) -> None:
        """This worker has only part of the state: the rest of the loop's body has no effect."""
        if self.present is not None:
            self.present.kind = StepKind.VOID
        if self._replica.buckets is not None:
            self._replica.buckets.renew()

    def _undo(self, step: Step) -> None:
        if step.undo is not None:
            box, groups = pickle.loads(step.undo)
            self._replica.box.restore(box)
            self._replica.state.set_groups(groups)  # a scheduler has changed them

    def _present(self) -> Step:
        assert self.present is not None
        return self.present


@contextmanager
def scaled_rates(optimizer: torch.optim.Optimizer, factor: float) -> Iterator[None]:
    """Within it the learning rates are multiplied by the batch rule's factor."""
    if factor == 1.0:
        yield
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * factor
    try:
        yield
    finally:
        for group, rate in zip(optimizer.param_groups, rates):
            group["lr"] = rate
