"""The script's training loop: epochs, passes over the loader, and what happens between two batches."""

from __future__ import annotations

import time
from collections.abc import Iterator

from shoal.torch.checked import StateCheck
from shoal.torch.checkpoint import Checkpoints
from shoal.torch.data_order import DataOrder
from shoal.torch.latch import Latch
from shoal.torch.meeting import Meeting
from shoal.torch.meter import Meter
from shoal.torch.order import Part
from shoal.torch.reconfigure import Reconfiguration
from shoal.torch.replica import Replica
from shoal.torch.session import Session
from shoal.torch.step import Steps
from shoal.torch.step_state import Outcome


class Loop:
    """Calls the parts at each point of the loop. The loader drives it, see `loader.Driver`."""

    def __init__(
        self,
        session: Session,
        replica: Replica,
        order: DataOrder,
        steps: Steps,
        checkpoints: Checkpoints,
        reconfiguration: Reconfiguration,
        meeting: Meeting,
        check: StateCheck,
        meter: Meter,
        rehearse: bool,
    ) -> None:
        self._session, self._replica, self._order, self._steps = session, replica, order, steps
        self._checkpoints, self._reconfiguration, self._meter = checkpoints, reconfiguration, meter
        self._meeting, self._check, self._rehearse = meeting, check, rehearse
        self._began = self._in_epochs = self._looped = False
        self._has_read_epoch = False  # the script has gone through the data of the present epoch
        self._passes = 0  # over the loader, outside of `epochs`
        self._latch = Latch()

    def epochs(self, count: int) -> Iterator[int]:
        order = self._order
        if self._looped:
            raise RuntimeError(
                "job.epochs() was called a second time. A job has one loop over its epochs, by which newcomers and "
                "resumed jobs know where it is: count all epochs in it, and branch on the epoch, as in "
                "`for epoch in job.epochs(15): if epoch < 5: ...`"
            )
        self._looped = True
        order.epochs = count
        if self._should_rehearse():
            with self._steps.rehearsal():
                yield 0
        self._begin()
        self._in_epochs = True
        while order.position.epoch < count:
            self._session.set_away(True)
            self._has_read_epoch = False
            yield order.position.epoch
            if not self.settle():  # its generation broke before this worker had the whole state
                self._reconfiguration.join()
            elif not self._steps.resume():
                # a step that resumes has brought all back to an earlier one, perhaps of this epoch
                if order.has_loader and not order.exhausted():
                    # Workers that have left their pass at different batches are found by the next step, not before.
                    self._check.postpone()
                order.next_epoch()
        self.finish()

    def _begin(self) -> None:
        if not self._began:
            self._replica.check_registered()
        self._began = True
        self._reconfiguration.join()

    def finish(self) -> None:
        if self._in_epochs:
            self.settle()  # the script may have left its loop after a step
        stopped = self._in_epochs and self._order.position.epoch < self._order.epochs
        self._in_epochs = False
        if self._session.outside_shoal or self._session.training:
            if self._session.joined:
                self._steps.end_of_logs()
                self._checkpoints.save_last()
            self._reconfiguration.finish(self._order.place() if stopped else None)

    def _should_rehearse(self) -> bool:
        """A newcomer rehearses one step before it joins."""
        if self._session.joined or not self._rehearse or not self._order.has_loader:
            return False
        return not self._session.is_first_start()

    # Called by the loader

    @property
    def rehearsing(self) -> bool:
        return self._steps.rehearsing

    def begin_pass(self) -> None:
        with self._latch:
            self._begin_pass()

    def _begin_pass(self) -> None:
        self._replica.check_unchanged()
        if self._replica.buckets is not None:
            self._replica.buckets.check_frozen()
        if self._in_epochs and self._has_read_epoch:
            raise RuntimeError(
                "the script goes through job.loader() a second time within one epoch of job.epochs(): an epoch is one "
                "pass. For more passes count more epochs, as in job.epochs(50) for 10 times 5 passes. For a pass "
                "without training use job.eval_loader(dataset, batch_size)"
            )
        if not self._in_epochs:
            if self._looped:
                raise RuntimeError(
                    "the script goes through job.loader() after the end of its training: for a pass without training "
                    "use job.eval_loader(dataset, batch_size)"
                )
            self._passes += 1
            if self._passes > 1 and not self._session.outside_shoal:
                raise RuntimeError(
                    "the script went through job.loader() a second time outside of job.epochs(): a worker that joins "
                    "later would not know its epoch. Write `for epoch in job.epochs(n)` instead of range(n)"
                )
            self._begin()
            self.settle()
            self._order.skip_finished_epoch()
        self._session.set_away(False)
        self._meeting.begin_pass()
        self._steps.resume()
        self._replica.mute(False)

    def check_pass(self) -> None:
        """Here, too: no pass follows the last one. What the script changes after it has no effect on the training."""
        self._has_read_epoch = True
        self._replica.check_unchanged()

    def end_pass(self) -> None:
        self._session.set_away(True)

    def open_rehearsal(self) -> None:
        self._steps.open_rehearsal()

    def open_step(self, part: Part, first: bool, samples: int) -> None:
        self._meeting.begin_batch()
        self._steps.open(part, first, samples)

    def weigh_part(self, amount: float) -> None:
        self._steps.weigh_part(amount)

    @property
    def weighs(self) -> bool:
        return self._steps.weighs

    def settle(self, asked: bool = False) -> bool:
        """The loop's body has run: the step is done, or has to be done again."""
        with self._latch:
            step = self._steps.settle(asked)
            if step is not None:
                self._reconfiguration.step_done(step)
        return self._session.joined

    def boundary(self) -> bool:
        with self._latch:
            if not self._steps.redoes:
                self._checkpoints.save_if_due()
            self._reconfiguration.boundary()
            self._steps.resume()
        return self._session.joined

    # Called by the gradient buckets

    def end_of_backward(self) -> None:
        began_s = time.perf_counter()
        with self._latch:
            outcome = self._steps.synchronize()
            if outcome is not Outcome.DONE:
                self._reconfiguration.halt(holds=outcome is Outcome.HELD)
        self._meter.sync_s += time.perf_counter() - began_s
