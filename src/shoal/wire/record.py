"""What the coordinator of one job knows and remembers. All of it that must outlive its process is JSON-ready."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Self

from shoal.wire import events as ev
from shoal.wire.events import Effect, Emit
from shoal.wire.messages import from_plain, to_plain
from shoal.wire.straggler import StragglerRule
from shoal.wire.views import Generation, Pending, Timing, WorkerView


class Record:
    def __init__(self, job: str, timing: Timing | None = None, pause_path: str = "") -> None:
        self.job = job
        self.timing = timing or Timing()
        self.pause_path = pause_path
        self.target: tuple[str, ...] = ()
        self.pausing = False
        self.active: Generation | None = None
        self.pending: Pending | None = None
        self.untold: str | None = None  # the kind of the active generation until all its members work in it
        self.recovering = False
        self.crew: tuple[str, ...] = ()  # everyone who may hold state, in rank order
        self.dead = 0
        self.issued = 0
        self.signature: tuple[str, ...] | None = None
        self.checkpoint: str | None = None
        self.checkpoint_step = 0
        self.checkpoints_asked = 0
        self.paused: str | None = None
        self.outcome: str | None = None
        self.stranded = False
        self.workers: dict[str, WorkerView] = {}
        self.stragglers = StragglerRule()
        self._effects: list[Effect] = []
        self._now_s = 0.0

    def _alive(self, workers: Iterable[str]) -> list[WorkerView]:
        return [v for w in workers if (v := self.workers.get(w)) is not None and v.alive]

    def _emit(self, event: ev.JobEvent) -> None:
        self._effects.append(Emit(event))

    def _break(self) -> None:
        self.recovering, self.dead = True, self.issued
        self.pending = self.untold = None  # a generation that not all came to work in is never told of

    def to_dict(self) -> dict[str, Any]:
        """All that a later coordinator needs to take this job's workers over. JSON-ready."""
        return {
            **{name: getattr(self, name) for name in _PLAIN},
            **{name: _listed(getattr(self, name)) for name in _TUPLES},
            "active": to_plain(self.active) if self.active else None,
            "pending": to_plain(self.pending) if self.pending else None,
            "workers": {
                v.worker: {name: getattr(v, name) for name in _REMEMBERED} for v in self.workers.values()
            },
        }

    @classmethod
    def from_dict(cls, saved: dict[str, Any], now_s: float, timing: Timing | None = None) -> Self:
        """As it was. Its workers have `reconnect_s` from now to say that they are still there."""
        new = cls(saved["job"], timing, saved["pause_path"])
        for name in _PLAIN:
            setattr(new, name, saved.get(name))
        for name in _TUPLES:
            setattr(new, name, None if saved[name] is None else tuple(saved[name]))
        new.active = from_plain(Generation, saved["active"]) if saved["active"] else None
        new.pending = from_plain(Pending, saved["pending"]) if saved["pending"] else None
        for worker, raw in saved["workers"].items():
            new.workers[worker] = WorkerView(worker, since_s=now_s, heard_s=now_s, **raw)
        return new


_PLAIN = (
    *("job", "pause_path", "pausing", "recovering", "dead", "issued", "untold"),
    *("checkpoint", "checkpoint_step", "checkpoints_asked", "paused", "outcome", "stranded"),
)
_TUPLES = ("target", "crew", "signature")
_REMEMBERED = ("alive", "stopping", "why", "announced", "met")


def _listed(values: tuple[str, ...] | None) -> list[str] | None:
    return None if values is None else list(values)
