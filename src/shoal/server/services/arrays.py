"""Arrays and sweeps: jobs that were submitted together, shown and changed together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from shoal.server.api import models as m
from shoal.server.loop.clock import as_time
from shoal.server.loop.lifecycle import WrongState
from shoal.server.loop.live_job import LiveJob
from shoal.server.services.errors import Conflict, NotFound
from shoal.server.services.naming import printable
from shoal.server.store import tables as t
from shoal.server.store.change import Row
from shoal.server.store.store import Store


class Arrays:
    def __init__(self, store: Store, jobs: Mapping[int, LiveJob]) -> None:
        """`jobs` are the unfinished ones."""
        self._store, self._jobs = store, jobs

    def find(self, array: str, only: str | None) -> Row:
        """The array of this number, or the newest of this name. `only`: the user whose arrays may be seen."""
        columns = t.arrays.c
        if array.isascii() and array.isdigit() and len(array) < 18:
            rows = self._store.rows_of(t.arrays, columns.id == int(array))
        else:
            rows = self._store.rows_of(t.arrays, columns.name == printable(array))
        rows = [row for row in rows if only in (None, row["user"])]
        if not rows:
            raise NotFound(f"there is no array {printable(array)!r}", "`shoal ps -a` lists jobs and arrays")
        return rows[-1]

    def show(self, row: Row) -> m.Array:
        states = self._store.states_of_array(row["id"])
        for job in self.unfinished(row["id"]):
            states[job.id] = job.life.state.value
        return m.Array(
            id=row["id"],
            name=row["name"],
            user=row["user"],
            tasks=row["tasks"],
            max_running=row["max_running"],
            created_at=as_time(row["created_s"]),
            jobs=dict(Counter(states.values())),
            gpus=sum(job.gpus for job in self.unfinished(row["id"])),
            first=min(states, default=0),
            last=max(states, default=0),
        )

    def unfinished(self, array_id: int) -> list[LiveJob]:
        return [job for job in self._jobs.values() if job.array == array_id and not job.is_over]

    def change(self, row: Row, what: Callable[[LiveJob], None]) -> m.Array:
        """Change all its unfinished jobs for which that is possible; an error if there is none."""
        jobs, done = self.unfinished(row["id"]), 0
        for job in jobs:
            try:
                what(job)
                done += 1
            except (WrongState, Conflict) as error:
                last = error
        if not jobs:
            raise Conflict(f"all jobs of {row['name']} are over")
        if not done:
            raise last
        return self.show(row)
