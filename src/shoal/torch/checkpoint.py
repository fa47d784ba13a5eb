"""Checkpoints: complete or absent. Written to a temporary file, synced, and renamed."""

from __future__ import annotations

import contextlib
import io
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from shoal.torch.data_order import DataOrder
from shoal.torch.meter import Meter
from shoal.torch.order import Position
from shoal.torch.replica import Replica
from shoal.torch.state import random_state, set_random_state


class Membership(Protocol):
    """What checkpoints need of the membership: a `Session`."""

    @property
    def rank(self) -> int: ...

    @property
    def on_gpu(self) -> bool: ...

    @property
    def checkpoints_asked(self) -> int:
        """How many checkpoints the coordinator has asked for so far."""
        ...

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
        path: str | None,
        every_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._session, self._replica, self._order = session, replica, order
        self._steps, self._meter = steps, meter
        self.path, self._every_s, self._clock = path, every_s, clock
        self._saved_s = clock()
        self._done = 0  # of those the coordinator has asked for

    def save(self, path: str | Path | None = None) -> bool:
        """Save the whole state at rank 0. False if it could not be written."""
        target = path or self.path
        if target is None:
            self._meter.note("checkpoint() has nowhere to write: give it a path, or init(checkpoint=...)")
            return False
        if not self._steps.counts or self._session.rank != 0:
            return True
        facts = self._facts()
        step = facts["position"].step
        before = self._session.set_away(True)
        try:
            self._write(target, facts)
        except OSError as error:
            self._meter.note(f"checkpoint at step {step} not written: {error}; the last one is kept")
            return False
        finally:
            self._session.set_away(before)
        self._meter.saved.append((str(target), step))
        self._saved_s = self._clock()
        return True

    def save_if_due(self) -> None:
        """Between two steps: save if the interval is over or the coordinator has asked for it."""
        if self._every_s is not None and self._clock() - self._saved_s > self._every_s:
            self._saved_s = self._clock()
            self.save()
        asked = self._session.checkpoints_asked
        if asked > self._done:
            self._done = asked
            if self.path:
                self.save()

    def save_for_pause(self, path: str | None, job: str) -> str:
        """Save the state from which the paused job resumes. Returns where it is."""
        facts, places = self._facts(), (path or self.path, f"/dev/shm/{job}.{os.getpid()}.paused")
        error: OSError | None = None
        for place in filter(None, places):
            try:
                self._write(place, facts)
            except OSError as failed:
                error = failed
            else:
                return place
        raise RuntimeError(f"the job cannot pause, because its state cannot be written: {error}")

    def load(self, path: str) -> None:
        try:
            with open(path, "rb") as file:
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

    def _write(self, path: str | Path, facts: dict[str, Any]) -> None:
        write_atomically(path, lambda file: self._replica.state.save(facts, file))


class _FailureWriter(io.BufferedWriter):
    """Keeps the error of a failed write: the one that torch raises instead does not mention files or disks."""

    failure: OSError | None = None

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self.failure = error
            raise


def write_atomically(path: str | Path, write: Callable[[io.BufferedIOBase], None]) -> None:
    """On any failure (a full disk, for example) the former file at `path` remains, and nothing else."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _FailureWriter(io.FileIO(temporary, "wb")) as file:
            try:
                write(file)
            except RuntimeError as error:
                raise file.failure or error from None
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    with contextlib.suppress(OSError):
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)  # the rename itself
        finally:
            os.close(directory)
