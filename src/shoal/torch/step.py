"""What a training step goes through: gradients, the vote, the optimizer step, and a step that breaks."""

from __future__ import annotations

import pickle
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from shoal.torch.data_order import DataOrder
from shoal.torch.gradients import Sync, sum_of_one
from shoal.torch.handover import Handover
from shoal.torch.meter import Meter
from shoal.torch.order import Part, Position
from shoal.torch.replica import Replica
from shoal.torch.same_weights import digest
from shoal.torch.step_state import Membership, Outcome, Step, StepKind
from shoal.torch.vote import Vote

OFTEN = 1000
"""Steps between two comparisons of the weights within an epoch."""


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
        #: Makes this worker continue in the generation of the survivors.
        self.halt: Callable[[], None] = lambda: None
        #: Whether the optimizer step of the last step was applied: not between two micro-batches.
        self.stepped = True
        self.rehearsing = False
        #: All workers have returned to an earlier step, from outside of one: what the script does has no effect until
        #: its next step or epoch.
        self._rewound = False
        #: Model and optimizer are no longer as the script made them, though no step of the job was done on them.
        self.altered = False
        #: Optimizer steps of the present step that were applied before it broke and is done again.
        self._applied = 0
        #: The generation in which the last step was opened, and its updates of each optimizer.
        self._last_updates: tuple[int, tuple[int, ...]] = (-1, ())
        self._outside: dict[int, int] = {}  # optimizer -> its steps since the last batch of the loader

    @property
    def counts(self) -> bool:
        """Whether what the script does now is part of the job's training."""
        real = self.present is None or self.present.kind is StepKind.REAL
        return real and not self.rehearsing and not self._session.retreated and not self._rewound

    @property
    def weight(self) -> float:
        """This worker's share of the present batch: of its samples or, once they are known, of what it weighs."""
        step, buckets = self.present, self._replica.buckets
        if step is None or not self.counts:
            return 0.0
        amount = self._amount(step)
        if amount is not None and buckets is not None and step.synced and buckets.aside.total:
            return amount / buckets.aside.total
        return step.part.weight

    @property
    def amount(self) -> float | None:
        """What this worker's part of the present batch counts, relative to the others. None: there is no batch."""
        step = self.present
        if step is None or not self.counts:
            return None
        amount = self._amount(step)
        return float(step.samples) if amount is None else amount

    @property
    def amount_of_value(self) -> float | None:
        """What a value counts that the script has computed from what it has drawn. None: there is no batch.

        That is the present micro-batch. A script that draws batches ahead, or weighs the step as a whole, means the
        whole step.
        """
        step = self.present
        if step is None or not self.counts or step.ahead or step.whole is not None:
            return self.amount
        return step.amounts[-1] if step.amounts else float(step.part.end - step.part.begin)

    @property
    def is_void(self) -> bool:
        """What the script does now has no effect: a step is done again, or this worker has to join again."""
        void = self.present is not None and self.present.kind is StepKind.VOID
        return void or self._session.retreated or self._rewound

    @property
    def observes(self) -> bool:
        """A newcomer's step without a part of the batch."""
        return self.present is not None and self.present.kind is StepKind.CATCH_UP

    @property
    def holds(self) -> bool:
        """The gradients of the present step are complete, and the membership does not know yet that it is done."""
        return self.present is not None and self.present.synced and not self.present.counted

    @property
    def redoes(self) -> bool:
        """A step is done again of which some optimizer steps are applied already."""
        return self._applied > 0

    @property
    def is_last_micro_batch(self) -> bool:
        return self.present is None or self.present.part.last

    @property
    def position(self) -> Position:
        """Where the job is, with the present step if its optimizer step is applied."""
        position, step = replace(self._order.position), self.present
        if step is not None and step.stepped and step.kind in (StepKind.REAL, StepKind.CATCH_UP):
            position.cursor, position.step = position.cursor + step.size, position.step + 1
        return position

    def log(self, name: str, value: Any) -> None:
        """Report a value: the mean over the workers if it is of a step that they share."""
        step, buckets = self.present, self._replica.buckets
        value = value.detach() if isinstance(value, torch.Tensor) else value
        shared = buckets is not None and self._session.data_group is not None
        if not shared:
            self._meter.values[name] = value
        elif step is None:
            if self._session.rank == 0:
                self._meter.values[name] = value
        else:
            assert buckets is not None
            buckets.aside.log(name, value, self.amount_of_value or 0.0)

    def end_of_logs(self) -> None:
        """No step follows that would average what the last one has logged: names that are new are main's values."""
        buckets = self._replica.buckets
        if buckets is not None and self._session.rank == 0 and self.counts:
            self._meter.values.update(buckets.aside.never_averaged())

    # Opening

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        self.rehearsing = self.altered = True
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
            self.present.generation = self._session.generation
            self.present.updates_of = [0] * len(self._replica.state.optimizers)
            self._outside.clear()
            if self._replica.several:
                self._keep_start(self.present)
        step = self._present()
        step.part = part
        step.parts.append(part)
        step.ahead = step.ahead or len(step.parts) > step.backwards + 1
        # Before the first micro-batch: the others do not wait for the last.
        if step.kind is StepKind.CATCH_UP and not self._vote.is_cast_early:
            self.observe(self._session.data_group, self._session.vote_group, self._session.generation)
        # Otherwise the script draws batches before it has used the former ones: each is armed when it is its turn.
        if step.backwards == len(step.parts) - 1:
            self._arm(step)

    def weigh_part(self, amount: float) -> None:
        """What the micro-batch that was drawn last counts."""
        step = self.present
        if step is None or step.kind is StepKind.REHEARSAL:
            return
        step.amounts.append(amount if step.part.end > step.part.begin else 0.0)
        if step.backwards == len(step.parts) - 1:
            self._reweigh(step)

    @property
    def weighs(self) -> bool:
        """Whether the script says what the gradients of the present step count."""
        return self.present is not None and self._amount(self.present) is not None

    def weigh(self, amount: float) -> None:
        """What this worker's gradient of the whole step counts."""
        step = self.present
        if step is None or step.kind is StepKind.REHEARSAL:
            return
        if step.backwards or step.synced:
            raise RuntimeError("call job.weigh() before the first backward() of a step")
        step.whole = amount
        self._reweigh(step)

    def _reweigh(self, step: Step) -> None:
        """What the batch counts is known only after the next backward was prepared."""
        buckets = self._replica.buckets
        if self._session.data_group is None:
            self._arm(step)
        elif step.kind is StepKind.REAL and buckets is not None:
            part = step.parts[step.backwards]
            buckets.reweigh(self._gradient_weight(step, part), self._earlier_weight(step, part))
            buckets.aside.amount = self._counted(step)

    def _amount(self, step: Step) -> float | None:
        """What this worker's gradient counts. None: it has the weight of its samples."""
        if step.whole is not None:
            return step.whole if step.samples else 0.0
        return sum(step.amounts) if step.amounts else None

    def _counted(self, step: Step) -> float | None:
        """By what the sums are divided. None: they need not be."""
        return None if self._order.batches.sums and step.whole is None else self._amount(step)

    def _gradient_weight(self, step: Step, part: Part) -> float:
        if part.end == part.begin:
            return 0.0
        if step.whole is not None:
            return step.whole
        if self._order.batches.sums:
            return 1.0
        return step.amounts[step.backwards] if step.backwards < len(step.amounts) else part.weight

    def _earlier_weight(self, step: Step, part: Part) -> float | None:
        """By what this worker multiplies a gradient from before this step, so that it counts once in all.

        Gradients whose weights add up to that by which their sum is divided need no factor.
        """
        batches = self._order.batches
        if self._counted(step) is not None:
            # later micro-batches may change what is divided by
            return 1.0 if batches.accumulate == 1 else None
        return part.weight if batches.sums else 1.0

    def _arm(self, step: Step) -> None:
        """Prepare the next backward."""
        if step.kind is StepKind.VOID:
            return
        alone = self._session.data_group is None
        sums = self._order.batches.sums
        if alone and self._order.batches.accumulate > 1 and step.amounts and not sums:
            self._arm_alone(step)
            return
        buckets = self._replica.buckets
        if buckets is None:
            return
        if alone:
            buckets.disarm()
            buckets.good = None  # a single member never does a step again
            return
        part, place = step.parts[step.backwards], self._order.position
        buckets.aside.set_place(
            (place.epoch, place.cursor, step.syncs),
            (*self._replica.state.rates(), self._stepped_last()),
            self._hash_of_state(place.step),
            place.step,
        )
        buckets.aside.amount = self._counted(step)
        buckets.aside.checks = step.kind is StepKind.REAL
        if step.kind is StepKind.CATCH_UP:
            buckets.watch(part.last)
        else:
            group, sync = self._session.summing(self.sync)
            weight, earlier = self._gradient_weight(step, part), self._earlier_weight(step, part)
            buckets.arm(group, sync, weight, step.backwards == 0, part.last, part.weight, earlier)

    def _hash_of_state(self, step: int) -> int:
        """Of what must be equal on all workers. An epoch may be long, so that includes the weights now and then."""
        value = self._replica.box.quick_hash()
        if step > 0 and step % OFTEN == 0 and self._replica.sharded is None:
            value += zlib.crc32(digest(self._replica.state))
        return value

    def _stepped_last(self) -> Any:
        """Which optimizers the script has stepped in the last step, if all workers know that."""
        if not self._replica.several:
            return self.stepped
        # Workers that come apart within a step, and newcomers, have not all seen the same of it.
        generation, updates = self._last_updates
        return updates if generation == self._session.generation else ()

    def _arm_alone(self, step: Step) -> None:
        """A single worker has nothing to sum, but its micro-batches count differently."""
        buckets, part = self._replica.required_buckets(), step.parts[step.backwards]
        buckets.aside.amount, buckets.aside.checks = self._amount(step), False
        weight, earlier = self._gradient_weight(step, part), self._earlier_weight(step, part)
        buckets.arm(None, sum_of_one, weight, step.backwards == 0, part.last, 1.0, earlier)

    def _keep_start(self, step: Step) -> None:
        """A step with several updates is done again from its beginning: keep what the script changes in it."""
        if self._session.data_group is not None:
            step.kept = pickle.dumps((self._replica.box.capture_small(), self._replica.state.groups()))
            self._replica.keep_stats()

    def part_done(self) -> None:
        """The backward of a micro-batch is over, and it is not the last one of its step."""
        step = self._present()
        step.backwards += 1
        if step.backwards < len(step.parts):
            self._arm(step)

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
        if self._session.data_group is None:
            self._install(step)
            buckets.good = None
            return Outcome.DONE
        catching_up = step.kind is StepKind.CATCH_UP
        self._session.arrived(self._session.done + 1)
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
        self._install(step)
        if self._replica.several:
            self._session.applied()
            step.counted = True
            self._arm(step)  # another backward pass may follow
        return Outcome.DONE

    def _install(self, step: Step) -> None:
        """The sums are complete: they become the gradients."""
        buckets = self._replica.buckets
        assert buckets is not None
        step.synced, step.syncs = True, step.syncs + 1
        buckets.install(keep_stats=not self._replica.several)
        self._handover.wait_read()
        buckets.scale()
        self._meter.values.update(buckets.aside.means)

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
        if step is None:
            self._step_outside(optimizer)
        if step is None or step.kind is StepKind.REHEARSAL:
            return original(*args, **kwargs)
        if step.kind is StepKind.VOID:
            return None
        if self._replica.several:
            step.updates += 1
            step.updates_of[self._replica.state.optimizers.index(optimizer)] += 1
            if step.updates <= self._applied:
                return None
        elif step.stepped and not self._session.outside_shoal:
            raise RuntimeError(
                "optimizer.step() was called twice for one batch of job.loader(): the second update is not that of all "
                "workers. Call it once per batch (for several updates: job.wrap(models=[...], optimizers=[...]))"
            )
        if self._replica.is_broken:
            self.halt()  # a worker was lost while the script clipped the gradients of a sharded model
            if self.is_void:
                return None
        self._handover.close_window(stepping=True)
        with self._handover.partial_step(), scaled_rates(optimizer, self._order.lr_factor()):
            result = original(*args, **kwargs)
        step.stepped = True
        if self._replica.buckets is not None and not self._replica.several:
            self._replica.buckets.disarm()  # further backward passes are the script's own
        return result

    def _step_outside(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer step without a batch of the loader: its gradients are this worker's alone."""
        if self._session.outside_shoal or self.rehearsing:
            return
        count = self._outside[id(optimizer)] = self._outside.get(id(optimizer), 0) + 1
        if count > 1:
            raise RuntimeError(
                "optimizer.step() was called twice without a batch of job.loader() in between: the gradients of other "
                "data are not exchanged between the workers. Train on `for batch in job.loader(dataset, ...)` instead "
                "of a DataLoader, within job.epochs()"
            )

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
            self._replica.mute(False)
            self._applied = max(self._applied, step.updates) if step.kept is not None else 0
            self.stepped = self.stepped and not self._applied
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
        self.stepped, self._applied = step.stepped, 0
        self._last_updates = (step.generation, tuple(step.updates_of))
        if step.kind is StepKind.REAL:
            self._meter.step_done(step.samples, step.began_s)
        return step

    def broke(self) -> None:
        """The generation broke: keep what a step done again starts from."""
        self._vote.discard()
        if self.present is not None:
            kept = self._replica.box.capture(), self._replica.state.groups()
            self.present.undo = pickle.dumps(kept)

    def recover(self, apply: bool, in_backward: bool = True) -> bool:
        """In the generation of the survivors: `apply` the gradients held, or do the present step again.

        `in_backward`: it broke at the end of a backward pass, not later. Returns whether batch size and learning rate
        follow now; otherwise they do after the present step.
        """
        step, buckets = self.present, self._replica.buckets
        if step is None or not (apply or (step.synced and not in_backward)):
            if step is not None:
                self._make_void(step)
            if buckets is not None and not apply:
                buckets.renew()
                buckets.restore_stats()
                buckets.disarm()
            return step is None or not step.resized
        if not step.synced or in_backward:
            self._install(step)
        step.counted = step.resized = True
        step.kind = StepKind.REAL
        if self._replica.several:
            # What the others have done since then is not known: the rest of the step until the next backward is the
            # same on all, and then they do it again together, without the updates that are applied.
            step.broken = True
            assert buckets is not None
            buckets.report_next(self._void)
        return False

    def _void(self) -> None:
        """A backward pass began in a step whose members have changed."""
        self._present().kind = StepKind.VOID

    def returned(self) -> None:
        """All workers returned to an earlier step: the rest of the loop's body has no effect."""
        if self.present is not None:
            self.broke()
            self._make_void(self.present)
        else:
            self._rewound = True
            self._replica.mute(True)

    def resume(self) -> bool:
        """The next step begins, or the next epoch. Returns whether all had returned to an earlier step."""
        rewound, self._rewound = self._rewound, False
        if rewound:
            self._replica.mute(False)
        return rewound

    def retreat(self) -> None:
        """This worker has only part of the state: the rest of the loop's body has no effect."""
        if self.present is not None:
            self._make_void(self.present)
        if self._replica.buckets is not None:
            self._replica.buckets.renew()

    def _make_void(self, step: Step) -> None:
        step.kind = StepKind.VOID
        self._replica.mute(True)

    def _undo(self, step: Step) -> None:
        for kept in filter(None, (step.undo, step.kept)):
            box, groups = pickle.loads(kept)
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
