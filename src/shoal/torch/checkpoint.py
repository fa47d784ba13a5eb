"""Checkpoints: when they are due, what they contain, and what a pause saves."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from shoal.torch.data_order import DataOrder
from shoal.torch.meter import Meter
from shoal.torch.order import Position
from shoal.torch.replica import Replica
from shoal.torch.state import random_state, set_random_state
from shoal.torch.state_files import StateFiles, Write
from shoal.wire.messages import Plan

if TYPE_CHECKING:
    from shoal.torch.sharding.shard_groups import ShardGroups
    from shoal.torch.sharding.shard_set import ShardSet

log = logging.getLogger("shoal.torch")

RETRY_S, LONGEST_RETRY_S = 1.0, 15.0


class Membership(Protocol):
    """What checkpoints need of the membership: a `Session`."""

    @property
    def rank(self) -> int: ...

    @property
    def on_gpu(self) -> bool: ...

    @property
    def finished(self) -> bool: ...

    @property
    def checkpoints_asked(self) -> int:
        """How many checkpoints the coordinator has asked for so far."""
        ...

    @property
    def job(self) -> str: ...

    def saved(self, path: str) -> None: ...

    def set_away(self, away: bool) -> bool: ...


class Progress(Protocol):
    """Where the training is: `Steps`."""

    @property
    def counts(self) -> bool: ...

    @property
    def position(self) -> Position: ...


class Checkpoints:
    def __init__(
        self,
        session: Membership,
        replica: Replica,
        order: DataOrder,
        steps: Progress,
        meter: Meter,
        files: StateFiles,
        path: str | None,
        every_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._session, self._replica, self._order = session, replica, order
        self._steps, self._meter, self._files, self._sleep = steps, meter, files, sleep
        self.path, self._every_s, self._clock = path, every_s, clock
        self._saved_s = clock()
        self._wanted: list[str] = []  # where the next checkpoint of a sharded model goes
        self._done = 0  # of those the coordinator has asked for

    def save(self, path: str | Path | None = None) -> bool:
        """Save the whole state at rank 0. False if it could not be written."""
        target = path or self.path
        if target is None:
            self._meter.note("checkpoint() has nowhere to write: give it a path, or init(checkpoint=...)")
            return False
        if self._replica.sharded is not None:
            return self._request(str(target), self._replica.sharded)
        if not self._steps.counts or self._session.rank != 0:
            return True
        facts = self._facts()
        step = facts["position"].step
        before = self._session.set_away(True)
        try:
            place = self._files.save(str(target), self._writing(facts))
        except OSError as error:
            self._meter.note(f"checkpoint at step {step} not written: {error}; the last one is kept")
            return False
        finally:
            self._session.set_away(before)
        self._meter.saved.append((place, step))
        self._saved_s = self._clock()
        return True

    def _request(self, target: str, sharded: ShardSet | ShardGroups) -> bool:
        """All workers of a sharded model save together, when they meet next: before the next step, or at the end."""
        if self._steps.counts:
            sharded.together.wants_checkpoint = True
            if target not in self._wanted:
                self._wanted.append(target)
            if sharded.shards.collectives.size == 1:
                return self._save_sharded(sharded)
            if self._session.finished:
                raise RuntimeError(
                    "job.checkpoint() came after the last epoch, where the workers of a sharded model no longer meet "
                    "to save it: call it within job.epochs"
                )
        return True

    def save_if_due(self) -> None:
        """Between two steps: save if the interval is over, or the coordinator or the script has asked for it."""
        if self._every_s is not None and self._clock() - self._saved_s > self._every_s:
            self._saved_s = self._clock()
            self.save()
        asked = self._session.checkpoints_asked
        if asked > self._done:
            self._done = asked
            if self.path:
                self.save()
        sharded = self._replica.sharded
        if sharded is not None and sharded.together.at_boundary():
            self._save_sharded(sharded)

    def save_last(self) -> None:
        """At the end of training, where no boundary follows: save a sharded model if a worker wants it."""
        sharded = self._replica.sharded
        if sharded is not None and sharded.together.at_end():
            self._save_sharded(sharded)

    def _save_sharded(self, sharded: ShardSet | ShardGroups) -> bool:
        sharded.together.wants_checkpoint = False
        targets: list[str | None] = [*self._wanted] or [self.path]
        self._wanted.clear()
        before = self._session.set_away(True)
        facts = self._facts()
        step = facts["position"].step
        saved, written = sharded.gather(facts), True
        for target in targets if saved is not None else ():
            if target is None:
                continue
            try:
                place = self._files.save(target, lambda file: torch.save(saved, file))
            except OSError as error:
                self._meter.note(f"checkpoint at step {step} not written: {error}; the last one is kept")
                written = False
            else:
                self._meter.saved.append((place, step))
        self._saved_s = self._clock()
        self._session.set_away(before)
        return written

    def save_sharded_for_pause(self, plan: Plan) -> None:
        """All workers give their rows to the first, which saves them."""
        sharded = self._replica.sharded
        assert sharded is not None
        saved = sharded.gather(self._facts())
        if saved is not None:
            self._session.saved(self._save_surely(plan.save, lambda file: torch.save(saved, file)))

    def save_for_pause(self, path: str | None) -> str:
        """Save the state from which the paused job resumes. Returns where it is, once it is safe."""
        return self._save_surely(path, self._writing(self._facts()))

    def _save_surely(self, path: str | None, write: Write) -> str:
        """This worker may have the only copy. So it tries until it succeeds, or until the coordinator ends it."""
        target, retry_s = path or self.path, RETRY_S
        if target is None:
            raise RuntimeError("the job cannot pause: it has nowhere to save its state")
        before = self._session.set_away(True)
        while True:
            try:
                place = self._files.save(target, write)
                break
            except OSError as error:
                log.warning("the pause waits, because the state cannot be saved: %s; trying again", error)
                self._sleep(retry_s)
                retry_s = min(2 * retry_s, LONGEST_RETRY_S)
        self._session.set_away(before)
        return place

    def load(self, path: str) -> None:
        try:
            with self._files.open(path) as file:
                facts = self._replica.state.load(file)
        except OSError as error:
            raise RuntimeError(f"cannot read the checkpoint {path}: {error}") from None
        except ValueError as error:
            raise RuntimeError(f"cannot continue from the checkpoint {path}: {error}") from None
        self._order.restore(facts, path)
        if facts["random"] is not None:
            set_random_state(facts["random"])
        self._meter.note(f"continued from {path} at step {self._order.position.step}")

    def load_if_new(self) -> None:
        """For a script outside Shoal: continue from the checkpoint if there is one and nothing is done yet."""
        if self.path and self._order.position == Position() and Path(self.path).exists():
            self.load(self.path)

    def _facts(self) -> dict[str, Any]:
        return {
            **self._order.facts(),
            "position": self._steps.position,
            "random": random_state(self._session.on_gpu),
        }

    def _writing(self, facts: dict[str, Any]) -> Write:
        return lambda file: self._replica.state.save(facts, file)
