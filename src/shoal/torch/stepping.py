"""One step: gradients, the vote, the optimizer, and the boundary at which members change."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from shoal.torch.checkpoint import write_atomically
from shoal.torch.core import Step, StepKind, advance
from shoal.torch.gradients import Sync, sum_of_one
from shoal.torch.joining import Joining
from shoal.torch.loader import Loader
from shoal.torch.order import Part
from shoal.torch.priority import step_back
from shoal.torch.vote import ballot, count
from shoal.torch.worker import Worker
from shoal.wire.messages import Kind


class Stepping(Joining):
    def checkpoint(self, path: Any = None) -> bool:
        raise NotImplementedError

    def _begin_pass(self, loader: Loader) -> None:
        if loader is not self._loader:
            raise RuntimeError("this loader belongs to another job")
        if self._buckets is not None:
            self._buckets.check_frozen()
        if not self._in_epochs:
            self._join()
            self._settle()
            if loader.length is not None and self.position.cursor >= loader.length:
                self.position.epoch, self.position.cursor = self.position.epoch + 1, 0

    def _open_rehearsal(self) -> None:
        self._step = Step(StepKind.REHEARSAL, Part(0, 0, 0.0, True), 0, time.perf_counter())

    def _open(self, part: Part, first: bool, samples: int) -> None:
        if first:
            kind = StepKind.CATCH_UP if self._catching_up is not None else StepKind.REAL
            assert self._loader is not None
            size = self._loader.step_samples(self.position.cursor, self._contributors)
            self._step = Step(kind, part, samples, time.perf_counter(), size)
        else:
            assert self._step is not None
            self._step.part = part
        if self._buckets is None or self._step is None:
            return
        group = self._groups.data if self._groups is not None else None
        if group is None:
            self._buckets.disarm()
            self._buckets.good = None  # alone, no step is ever done again
        elif self._step.kind is StepKind.CATCH_UP:
            if (
                self._looking is None
            ):  # before the first micro-batch: the others need not wait for the last one
                assert self._groups is not None
                self._look_on(self._groups, self.generation)
            if part.last:
                self._buckets.watch()
            else:
                self._buckets.disarm()
        else:
            self._buckets.arm(*self._summing(group), part.weight, first, part.last)

    def _summing(self, group: Any) -> tuple[Any, Sync]:
        """Where gradients are added up, and how: while newcomers look on, among the holders."""
        if self._former is None:
            return group, self.sync
        return self._former.data, self.sync if self._former.data is not None else sum_of_one

    def _end_of_backward(self) -> None:
        """All buckets are on their way: wait for them, then vote."""
        worker, step, buckets = self._worker, self._step, self._buckets
        assert worker is not None
        assert step is not None
        assert buckets is not None
        began_s = time.perf_counter()
        worker.member.arrived = self.position.step + 1
        if self._growing and self._groups is not None:
            for link in self._groups.links:
                link.hold()
            if self._final:
                self._tell_rest()
        received, whole, voted = True, True, False
        if step.kind is StepKind.CATCH_UP:
            assert self._catching_up is not None
            received = self._take_window(self._catching_up, self.position.step)
        # Every one: what is under way would write into the buckets later.
        for work, bucket in zip(buckets.works, buckets.buckets):
            whole = worker.wait(work) and whole
            if whole and self._former is not None and self._groups is not None:
                for link in self._groups.links:
                    link.give(bucket.flat)
        if step.kind is StepKind.CATCH_UP:
            looking, self._looking = self._looking, None
            voted = whole and self._tally(looking, self._looked_flag)
            whole = whole and received
        elif whole:
            voted = self._cast_vote()
        if whole and voted:
            step.synced = True
            buckets.install()
            if self._growing:
                self._wait_read()
        else:
            self._halt(holds=whole)
        self.meter.sync_s += time.perf_counter() - began_s

    def _cast_vote(self) -> bool:
        """One all-reduce of one number: all have the gradients; do all have leave to switch after this step?"""
        worker, groups = self._worker, self._groups
        assert worker is not None
        assert groups is not None
        flag = worker.member.flag()
        self._vote.fill_(ballot(flag, self._rest_fits(flag)))
        return self._tally(groups.vote.allreduce([self._vote]), flag)

    def _tally(self, work: Any, flag: int) -> bool:
        worker = self._worker
        assert worker is not None
        if not worker.wait(work):
            return False
        raised, fitting, total = count(int(self._vote))
        self._next_final = fitting == len(self._contributors)
        size = len(worker.member.members)
        if flag and raised == size and total == size * flag:
            with worker.lock:
                if worker.member.flag() == flag:
                    worker.member.agree()
        return True

    def _optimizer_step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if any(argument is not None for argument in (*args[:1], kwargs.get("closure"))):
            raise RuntimeError(
                "optimizer.step(closure) is not supported: call backward() before it, and step() without one"
            )
        step = self._step
        if step is None or step.kind is StepKind.REHEARSAL:
            return original(*args, **kwargs)
        if step.kind is StepKind.VOID:
            return None
        self._close_windows(stepping=True)
        optimizer = self._state().optimizer
        if step.kind is StepKind.CATCH_UP and self._catching_up is not None and not self._final:
            self._follow_groups(self._catching_up)
            original = partial(self._partial_step, self._catching_up, original)
        factor = self._loader.rule.current(self.position.step) if self._loader is not None else 1.0
        rates = [group["lr"] for group in optimizer.param_groups]
        if factor != 1.0:
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * factor
        result = original(*args, **kwargs)
        if factor != 1.0:
            for group, rate in zip(optimizer.param_groups, rates):
                group["lr"] = rate
        step.stepped = True
        if self._buckets is not None:
            self._buckets.disarm()  # what is differentiated from here on is the script's own affair
        return result

    def _settle(self, asked: bool = False) -> None:
        """The loop's body has run: the step is done, or is to be done again. `asked`: for the next batch."""
        step, self._step = self._step, None
        if step is None:
            return
        if self._buckets is not None:
            self._buckets.disarm()
        if step.kind is StepKind.VOID:
            if step.undo is not None:
                box, groups = pickle.loads(step.undo)
                self.state.restore(box)
                self._state().set_groups(groups)  # a scheduler has moved them on
            return
        if self._groups is not None and self._groups.data is not None and not step.synced:
            if asked:
                raise RuntimeError(
                    "the loop's body must call backward() for every batch, the others wait for it: "
                    "to leave one out, multiply its loss by 0"
                )
            return  # the script has left its loop before this step
        self._close_windows(stepping=False)
        advance(self.position, step)
        if step.resized:
            self._resized()
        self._stepped = step.stepped
        if self._worker is not None:
            self._count(self._worker, step)
        if step.kind is StepKind.CATCH_UP:
            return
        self.meter.step_done(step.samples, step.began_s)

    def _count(self, worker: Worker, step: Step) -> None:
        with worker.lock:
            if not step.counted:
                worker.member.applied()
            if len(worker.member.members) == 1:
                worker.member.arrived = worker.member.done
                if flag := worker.member.flag():
                    self._next_final = self._rest_fits(flag)  # there is no vote to tell it
                    worker.member.agree()
        if self._growing and self._final:
            # The newcomers have got everything: from now on they have their part.
            self._contributors, self._catching_up = self._next_contributors, None
            worker.retire(self._former)
            self._former = None
            self._resized()
            self.meter.pauses.append((worker.member.generation, self._pause_s))
            worker.link.say()
        if self._final or not self._growing:
            self._final, self._pause_s = False, 0.0

    def _boundary(self) -> None:
        """Between two steps, when another one is to come: the only place where members change."""
        worker = self._worker
        if self._every_s is not None and time.monotonic() - self._saved_s > self._every_s:
            self._saved_s = time.monotonic()
            self.checkpoint()
        if worker is None:
            return
        if worker.member.checkpoints > self._checkpoints:
            self._checkpoints = worker.member.checkpoints
            if self.checkpoint_path:
                self.checkpoint()
        if self._check_next and not self._growing and self.position.step > self._check_after:
            self._compare()
        if worker.interrupted:
            self._halt(holds=False)
            if not self._joined:
                return
        if worker.member.agreed and self._stepped:
            self._switch(worker)
        elif self._growing and self.position.step > self._window_step:
            self._next_window()

    def _next_window(self) -> None:
        """Newcomers look on for another step; the last one if all holders said that the rest fits into it."""
        began_s = time.perf_counter()
        self._final = self._next_final
        if self._final and self._loader is not None:
            self._loader.changed()
        self._open_windows()
        self._pause_s += time.perf_counter() - began_s

    def _switch(self, worker: Worker) -> None:
        began_s = time.perf_counter()
        coming = worker.member.plan
        if coming is not None and coming.kind is Kind.PAUSE and coming.holders[0] == worker.name:
            # Before anyone hears that this worker has left: its word is what the job resumes from.
            self._save_for_pause(worker, coming.save or self.checkpoint_path or "")
        with worker.lock:
            plan = worker.member.boundary()
            if plan is None:
                return
            stays = worker.name in plan.members
            if stays:
                self._keep_stats()
                self._use(worker.take(plan.number), plan.members, plan.holders)
        if not stays:
            self._leave(worker)
        self._final = bool(plan.newcomers) and self._next_final
        if plan.newcomers:
            self._send(plan)
            if self._loader is not None:
                self._loader.changed()
        else:
            self._resized()
            self.meter.pauses.append((plan.number, time.perf_counter() - began_s))
        self._pause_s = time.perf_counter() - began_s
        worker.link.say()

    def _leave(self, worker: Worker) -> None:
        worker.link.say_now()
        step_back()
        # Stay until the others have read all that was sent to them.
        with worker.lock:
            worker.lock.wait_for(lambda: worker.quit is not None, timeout=10.0)
        raise SystemExit(0)

    def _save_for_pause(self, worker: Worker, path: str) -> None:
        state, facts = self._state(), self._facts()
        error: OSError | None = None
        for place in (path, f"/dev/shm/{worker.identity.job}.{os.getpid()}.paused"):
            try:
                write_atomically(place, lambda file: state.save(facts, file))
            except OSError as failed:
                error = failed
                continue
            with worker.lock:
                worker.member.saved = place
            return
        raise RuntimeError(f"the job cannot pause: its state can be written nowhere: {error}")

    def _compare(self) -> None:
        """Checked mode: after the first step of a generation all members must be equal bit for bit."""
        self._check_next = False
        worker, groups = self._worker, self._groups
        assert worker is not None
        assert groups is not None
        rule = self._loader.rule if self._loader is not None else None
        digest = self._state().digest((self.position, rule))
        mine = torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(torch.int64)
        both = torch.cat([mine, mine * mine])
        if not worker.wait(groups.vote.allreduce([both])):
            return  # broken for another reason; the next step finds out
        size = len(worker.member.members)
        total, squares = both[: len(mine)], both[len(mine) :]
        if not torch.equal(squares * size, total * total):
            raise RuntimeError(
                f"generation {worker.member.generation}: the members' states differ: "
                "is all that the script keeps (schedules, scalers, averages) in job.state?"
            )
        self._note(f"generation {worker.member.generation}: state verified bit for bit on {size} members")
