"""The view on which a policy decides: one row per active job, in order of submission, as arrays.

The arrays are updated, never rebuilt: a job that arrives is appended, the row of a job that leaves is
removed, and progress is computed only for jobs whose share changes. Columns are attributes of `View`. They are
slices of the storage, so do not keep them while rows are added or removed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.core import view_kernels
from shoal.core.arrays import FloatArray, IntArray
from shoal.core.errors import ShoalError
from shoal.core.job import GpuRange, Job, Kind
from shoal.core.plan import CHANGE_COLUMNS
from shoal.core.profile import Profile
from shoal.core.speed_tables import SpeedTables
from shoal.core.view_kernels import FLOATS, INTS, MAX_GPUS

_NONE: IntArray = np.empty(0, np.int32)
_NONE_MOVED: NDArray[np.bool_] = np.empty(0, np.bool_)


class View:
    """One row per active job. `job_ids` is in ascending order, so that a row is found by bisection."""

    submit_s: FloatArray
    weight: FloatArray
    total: FloatArray
    remaining: FloatArray
    rate: FloatArray
    settled_s: FloatArray
    first_start_s: FloatArray
    last_start_s: FloatArray
    changed_s: FloatArray
    attained_gpu_s: FloatArray
    user: IntArray
    min_gpus: IntArray
    max_gpus: IntArray
    requested_gpus: IntArray
    gpus: IntArray
    gpu_type: IntArray
    servers: IntArray
    is_ps: IntArray
    generation: IntArray
    priority: IntArray
    step_gpus: IntArray
    #: [gpu type, row]: offset of the job's speed curve for that type in `speeds`; 0 if it may not use the type
    speed_at: IntArray
    #: [gpu type, row]: the largest share of that type that the job can use; 0 if it may not use the type
    type_max: IntArray

    def __init__(
        self, gpu_types: tuple[str, ...], total_gpus: int, policy_columns: tuple[str, ...] = ()
    ) -> None:
        self.gpu_types = gpu_types
        #: Names of the columns with the policy's own state of each job; see `column`.
        self.policy_columns = policy_columns
        self.total_gpus = total_gpus
        self.tables = SpeedTables(gpu_types)
        self.n = 0
        types = len(gpu_types)
        self._ids: NDArray[np.int64] = np.zeros(64, np.int64)
        self._floats: FloatArray = np.zeros((len(FLOATS) + len(policy_columns), 64))
        self._ints: IntArray = np.zeros((len(INTS) + 2 * types, 64), np.int32)
        self._order: list[int] = []
        #: Speeds of parameter-server jobs by [servers - 1, workers - 1], by job id, where they are known.
        self.by_servers: dict[int, FloatArray] = {}
        #: The time of the current decision.
        self.now_s = 0.0
        self.cells = SimpleNamespace()
        self._lay_cells()
        self._limits: dict[tuple[int, GpuRange, tuple[str, ...]], tuple[IntArray, int]] = {}

    def __len__(self) -> int:
        return self.n

    @property
    def job_ids(self) -> NDArray[np.int64]:
        return self._ids[: self.n]

    @property
    def speeds(self) -> FloatArray:
        """All speed curves, concatenated: job `row` runs at `speeds[speed_at[t, row] + gpus]` on type `t`."""
        return self.tables.values

    def column(self, name: str) -> FloatArray:
        """A column that the policy declared in `Policy.columns`. It starts at 0 for every job."""
        return self._floats[len(FLOATS) + self.policy_columns.index(name), : self.n]

    def _grow(self) -> None:
        """Double the storage. It is never full: a slice of all of it would have another memory layout, and
        kernels would be compiled again for that."""

        def double(a: NDArray[np.generic]) -> NDArray[np.generic]:
            return np.concatenate([a, np.zeros_like(a)], axis=-1)

        self._ids = double(self._ids)  # type: ignore[assignment]
        self._floats = double(self._floats)  # type: ignore[assignment]
        self._ints = double(self._ints)  # type: ignore[assignment]
        self._lay_cells()

    def _lay_cells(self) -> None:
        """Set up `cells`: `cells.<column>[row]` is one number. For few rows this is faster than a slice."""
        for i, name in enumerate(FLOATS):
            setattr(self.cells, name, memoryview(self._floats[i]))
        for i, name in enumerate(INTS):
            setattr(self.cells, name, memoryview(self._ints[i]))

    def __getstate__(self) -> dict[str, Any]:
        """Leave out `cells`, which are views of the storage; `__setstate__` sets them up again."""
        return {k: v for k, v in self.__dict__.items() if k != "cells"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.cells = SimpleNamespace()
        self._lay_cells()

    def row(self, job_id: int) -> int:
        """The row of an active job; KeyError if there is none."""
        row = bisect_left(self._order, job_id)
        if row == self.n or self._order[row] != job_id:
            raise KeyError(job_id)
        return row

    def job_at(self, row: int) -> int:
        """The id of the job in this row."""
        return self._order[row]

    def __contains__(self, job_id: int) -> bool:
        row = bisect_left(self._order, job_id)
        return row < self.n and self._order[row] == job_id

    def add(self, job_id: int, job: Job, profile: Profile, user: int, now_s: float) -> int:
        """Append a job that has just been submitted. Its id must exceed all previous ids."""
        n = self.n
        if n and job_id <= self._order[-1]:
            raise ValueError(f"job ids must ascend: {job_id} after {self._order[-1]}")
        if n + 1 == len(self._ids):
            self._grow()
        self.n = n + 1
        self._ids[n] = job_id
        self._order.append(job_id)
        work = np.nan if job.iterations is None else job.iterations
        is_ps = job.kind is Kind.PARAMETER_SERVER
        view_kernels.fill_row(
            self._floats, self._ints, n, job.submit_s, job.weight, work,
            user, job.gpus.min, job.requested_gpus, is_ps, now_s,
        )  # fmt: skip
        self.cells.priority[n], self.cells.step_gpus[n] = job.priority, job.gpus.step
        self.set_profile(n, job, profile)
        return n

    def set_profile(self, row: int, job: Job, profile: Profile) -> None:
        """Set the profile of a row, for the GPU types that the job allows."""
        limits = self._limits_of(job, profile)
        self._ints[len(INTS) :, row], self._ints[MAX_GPUS, row] = limits
        if profile.by_servers is not None and job.kind is Kind.PARAMETER_SERVER:
            self.by_servers[int(self._ids[row])] = profile.by_servers
        if limits[1] < job.gpus.min:
            raise ShoalError(
                f"job {job.name!r} needs {job.gpus.min} GPUs at least, but by its profile and its GPU types "
                f"no more than {limits[1]} are of use; lower its min or measure a larger share"
            )

    @property
    def profiles_known(self) -> int:
        """The number of profiles in the tables, including those of former jobs and of earlier measurements."""
        return len(self.tables)

    def forget_profiles(self) -> None:
        """Clear the tables. Call `set_profile` for every row afterwards."""
        self.tables = SpeedTables(self.gpu_types)
        self._limits.clear()

    def most_useful(self, job: Job, profile: Profile) -> int:
        """The most GPUs that the job can use, by its range, its profile and the cluster."""
        return self._limits_of(job, profile)[1]

    def most_by_type(self, job: Job, profile: Profile) -> IntArray:
        """By GPU type: the most GPUs that the job can use; 0 if it may not use the type."""
        return self._limits_of(job, profile)[0][len(self.gpu_types) :]

    def least_size(self, job: Job, profile: Profile, gpu_type: int) -> int:
        """The smallest maximum with which a share of at least the job's minimum is the fastest.

        This is its minimum, unless fewer GPUs than that would be as fast.
        """
        limits, least = self._limits_of(job, profile)[0], job.gpus.min
        at, most = int(limits[gpu_type]), int(limits[len(self.gpu_types) + gpu_type])
        step = job.gpus.step
        sizes = range(least, most + 1, step)
        return next((n for n in sizes if self._useful(at, n, step) >= least), most + step)

    def limit_sizes(self, row: int, sizes: Sequence[int], *, elastic: bool) -> None:
        """Limit the row to these numbers of GPUs by type. Call it after `set_profile`."""
        cells = self.cells
        step = int(cells.step_gpus[row])
        for t, size in enumerate(sizes):
            if elastic:
                most = self._useful(int(self.speed_at[t, row]), min(int(self.type_max[t, row]), size), step)
                self.type_max[t, row] = most if most >= cells.min_gpus[row] else 0
            elif size < max(sizes):
                self.type_max[t, row] = 0
        if elastic:
            cells.max_gpus[row] = max(self.type_max[:, row])
            cells.requested_gpus[row] = min(cells.requested_gpus[row], cells.max_gpus[row])
        else:
            cells.requested_gpus[row] = max(sizes)

    def _limits_of(self, job: Job, profile: Profile) -> tuple[IntArray, int]:
        """(speed_at and type_max of all types, concatenated; max_gpus)."""
        key = (id(profile), job.gpus, job.gpu_types)
        limits = self._limits.get(key)
        if limits is None:
            limits = self._limits[key] = self._find_limits(job, profile)
        return limits

    def _find_limits(self, job: Job, profile: Profile) -> tuple[IntArray, int]:
        at, longest = self.tables.rows(profile)
        allowed = np.array([not job.gpu_types or t in job.gpu_types for t in self.gpu_types])
        limit = min(job.gpus.max, self.total_gpus)
        most = [
            self._useful(at[t], min(int(longest[t]), limit), job.gpus.step) if allowed[t] else 0
            for t in range(len(self.gpu_types))
        ]
        return np.concatenate([np.where(allowed, at, 0), most]).astype(np.int32), max(most)

    def _useful(self, at: int, longest: int, step: int) -> int:
        """The smallest of the fastest shares up to `longest`. A larger share would not be faster."""
        return step * int(np.argmax(self.speeds[at : at + longest + 1 : step]))

    def remove(self, job_id: int) -> None:
        """Remove the row of a job that has left."""
        row, n = self.row(job_id), self.n
        del self._order[row]
        self.by_servers.pop(job_id, None)
        view_kernels.remove_row(self._ids, self._floats, self._ints, row, n)
        self.n = n - 1

    def sum_and_first_beyond(self, gpus: IntArray) -> tuple[int, int]:
        """The sum of these shares, and the first row whose share is out of bounds, or -1."""
        return view_kernels.sum_and_first_beyond(self._ints, gpus)

    def set_shares(
        self,
        gpus: IntArray,
        gpu_types: IntArray | None,
        servers: IntArray | None,
        moved: NDArray[np.bool_] | None,
        now_s: float,
    ) -> NDArray[np.int64]:
        """Set the share of every row; return the changes in the form of `Plan.changes`.

        Without `gpu_types` there is only one type. Without `servers`, jobs that use servers get as many as
        GPUs. A row in `moved` changes even if its share is the same.
        """
        types = _NONE if gpu_types is None else gpu_types
        ps = _NONE if servers is None else servers
        changes = np.empty((len(gpus), CHANGE_COLUMNS), np.int64)
        count = view_kernels.set_shares(
            self._floats,
            self._ints,
            self._ids,
            gpus,
            types,
            ps,
            _NONE_MOVED if moved is None else moved,
            now_s,
            changes,
        )
        return changes[:count]

    def go_on(self, changes: NDArray[np.int64], now_s: float) -> FloatArray:
        """Let the rows that just changed run from now at the speed of their curves; return when each will end."""
        ends = np.empty(len(changes))
        view_kernels.go_on(self._floats, self._ints, self.tables.values, changes, now_s, ends)
        return ends

    def dump(self, row: int) -> dict[str, float | int | None]:
        """The row as plain data. Infinity and nan become None; `load` restores them by column."""
        values: dict[str, float | int | None] = {}
        for i, name in enumerate((*FLOATS, *self.policy_columns)):
            value = float(self._floats[i, row])
            values[name] = value if np.isfinite(value) else None
        for i, name in enumerate(INTS):
            values[name] = int(self._ints[i, row])
        return values

    def columns(
        self, rows: Sequence[int], parked: Sequence[tuple[FloatArray, IntArray]] = ()
    ) -> dict[str, list[float] | list[int]]:
        """All columns of these rows as plain data, followed by those of parked jobs; `load` takes one row of it."""
        floats = np.concatenate([self._floats[:, rows], *(f[:, None] for f, _ in parked)], axis=1)
        ints = np.concatenate([self._ints[:, rows], *(i[:, None] for _, i in parked)], axis=1)
        names = (*FLOATS, *self.policy_columns)
        found: dict[str, list[float] | list[int]] = dict(zip(names, floats.tolist()))
        return found | dict(zip(INTS, ints.tolist()))

    def load(self, row: int, values: Mapping[str, float | int | None]) -> None:
        """Set the row from the result of `dump`, or of `columns`. Policy columns and numbers that are missing are 0."""
        for i, name in enumerate((*FLOATS, *self.policy_columns)):
            value = values.get(name, 0.0) if i >= len(FLOATS) else values[name]
            missing = np.nan if name in ("total", "remaining") else np.inf
            self._floats[i, row] = missing if value is None else value
        for i, name in enumerate(INTS):
            self._ints[i, row] = int(values.get(name) or 0)

    def park(self, job_id: int) -> tuple[FloatArray, IntArray]:
        """Remove a job from the view for a while; return its row for `unpark`."""
        row = self.row(job_id)
        kept = self._floats[:, row].copy(), self._ints[:, row].copy()
        self.remove(job_id)
        return kept

    def unpark(self, job_id: int, kept: tuple[FloatArray, IntArray]) -> None:
        """Insert a parked job at its place in the order of submission."""
        n = self.n
        if n + 1 == len(self._ids):
            self._grow()
        row = bisect_left(self._order, job_id)
        self._order.insert(row, job_id)
        self._ids[row + 1 : n + 1] = self._ids[row:n].copy()
        self._floats[:, row + 1 : n + 1] = self._floats[:, row:n].copy()
        self._ints[:, row + 1 : n + 1] = self._ints[:, row:n].copy()
        self._ids[row] = job_id
        self._floats[:, row], self._ints[:, row] = kept
        self.n = n + 1

    def remaining_now(self, now_s: float) -> FloatArray:
        """Iterations left at `now_s`."""
        left = np.empty(self.n)
        view_kernels.left_now(self._floats, now_s, left)
        return left

    def attained_now(self, now_s: float) -> FloatArray:
        """GPU-seconds received up to `now_s`."""
        return self.attained_gpu_s + self.gpus * (now_s - self.changed_s)


def _float_column(i: int) -> property:
    def fill(view: View, values: FloatArray) -> None:
        view._floats[i, : view.n] = values

    return property(lambda view: view._floats[i, : view.n], fill)


def _int_column(i: int) -> property:
    def fill(view: View, values: IntArray) -> None:
        view._ints[i, : view.n] = values

    return property(lambda view: view._ints[i, : view.n], fill)


def _typed_columns(i: int) -> property:
    def rows(view: View) -> IntArray:
        types = len(view.gpu_types)
        begin = len(INTS) + i * types
        return view._ints[begin : begin + types, : view.n]

    return property(rows)


for _make, _names in (
    (_float_column, FLOATS),
    (_int_column, INTS),
    (_typed_columns, ("speed_at", "type_max")),
):
    for _i, _name in enumerate(_names):
        setattr(View, _name, _make(_i))
