"""The outbox: changes are written first and carried out afterwards.

Changes, events and effects are put in as they are decided. `flush` writes them in one transaction and then runs
the effects. If the disk is full, everything stays here and is tried again, so memory, store and processes stay
consistent.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from shoal.server.loop import snapshot
from shoal.server.loop.live_job import LiveJob, LiveWorker
from shoal.server.store.store import Store, StoreDown, StoreFull

log = logging.getLogger("shoal.server")


class Outbox:
    def __init__(
        self,
        store: Store,
        now_s: Callable[[], float],
        snapshot: Callable[[], dict[str, Any] | None],
        named: Callable[[Mapping[int, int]], list[list[Any]]],
    ) -> None:
        """`snapshot` gives the state of the scheduler, or None if it cannot be saved.

        `named` gives a target by the names of nodes.
        """
        self._store, self._now_s, self._snapshot, self._named = store, now_s, snapshot, named
        self._settings: dict[str, Any] = {}
        self._snapshot_due = False
        self._knowledge: dict[str, dict[str, Any]] = {}
        self._jobs: dict[int, LiveJob] = {}
        self._new_workers: list[dict[str, Any]] = []
        self._worker_changes: dict[str, dict[str, Any]] = {}
        self._events: list[dict[str, Any]] = []
        self._effects: list[Callable[[], None]] = []
        self._flushing = False
        #: Why the last flush failed; None if it did not.
        self.trouble: str | None = None

    def __bool__(self) -> bool:
        return self._has_rows or bool(self._effects)

    @property
    def _has_rows(self) -> bool:
        rows = (
            *(self._jobs, self._new_workers, self._worker_changes),
            *(self._events, self._knowledge, self._settings),
        )
        return self._snapshot_due or any(rows)

    def snapshot_due(self) -> None:
        """The state of the scheduler has changed: write it with the next transaction."""
        self._snapshot_due = True

    def knowledge(self, model: str, speed: dict[str, Any]) -> None:
        """What is known of the speed of jobs with this model word has changed."""
        self._knowledge[model] = speed

    def setting(self, key: str, value: Any) -> None:
        """Write a setting of the store."""
        self._settings[key] = value

    def job(self, job: LiveJob) -> None:
        """The job has changed."""
        self._jobs[job.id] = job

    def new_worker(self, job: LiveJob, worker: LiveWorker) -> None:
        self._new_workers.append(
            {
                "id": worker.id,
                "job": job.id,
                "rank": worker.rank,
                "node": worker.node,
                "gpu": worker.device[1],
                "more_gpus": list(worker.more_gpus),
                "state": worker.state,
                "started_s": worker.started_s,
            }
        )

    def worker(self, worker_id: str, **changes: Any) -> None:
        self._worker_changes.setdefault(worker_id, {}).update(changes)

    def event(self, type: str, message: str, job: LiveJob | None = None, **data: Any) -> None:
        row = {"type": type, "message": message, "data": data, "actor": data.pop("actor", None)}
        if job is not None:
            row |= {"job": job.id, "user": job.user, "plan": job.plan}
        self._events.append(row)

    def effect(self, act: Callable[[], None]) -> None:
        """Run this after everything that was put in so far is written."""
        self._effects.append(act)

    def flush(self) -> bool:
        """Write, then act. False if it could not be written; call again later."""
        if self._flushing:  # an effect put something in: the loop below takes it
            return True
        self._flushing = True
        try:
            while self:
                self._write()
                effects, self._effects = self._effects, []
                for act in effects:
                    try:
                        act()
                    except Exception:  # of one worker or job: the others must not be forgotten
                        log.exception("a change was recorded and could not be carried out")
            self.trouble = None
            return True
        except (StoreFull, StoreDown) as error:
            if self.trouble is None:
                log.error("%s", error)
            self.trouble = str(error)
            return False
        finally:
            self._flushing = False

    def _write(self) -> None:
        if not self._has_rows:
            return
        value = self._snapshot() if self._snapshot_due else None
        with self._store.change(self._now_s()) as change:
            rows = [job.row() | {"target": self._named(job.wanted)} for job in self._jobs.values()]
            change.update_jobs(rows)
            change.add_workers(self._new_workers)
            change.update_workers(self._worker_changes)
            for row in self._events:
                change.event(**row)
            for model, speed in self._knowledge.items():
                change.put_knowledge(model, speed)
            for key, setting in self._settings.items():
                change.put(key, setting)
            if value is not None:
                change.put(snapshot.KEY, value)
        self._snapshot_due = False
        self._knowledge.clear()
        self._settings.clear()
        self._jobs.clear()
        self._new_workers.clear()
        self._worker_changes.clear()
        self._events.clear()
