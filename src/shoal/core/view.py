"""The view a policy decides on: one row per active job, in order of submission, as arrays.

The arrays are kept up to date and never rebuilt: a job that arrives is appended, a job that leaves is
closed up, and progress is settled only for jobs whose share changes. Columns are attributes of `View`;
they are slices of the storage and are replaced when rows come or go, so do not keep them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shoal.core.errors import ShoalError
from shoal.core.job import Job, Kind
from shoal.core.profile import Profile

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int32]

_FLOATS = (
    "submit_s",  #: when the job arrived
    "weight",  #: the owner's weight among their own jobs
    "total",  #: total iterations; nan when unknown
    "remaining",  #: iterations left at `settled_s`
    "rate",  #: iterations per second since `settled_s`
    "settled_s",  #: when `remaining` was true; in the future while a job is between two shares
    "first_start_s",  #: when it first got a share; inf before
    "last_start_s",  #: when it last went from no share to some; inf before
    "changed_s",  #: when its share last changed
    "attained_gpu_s",  #: GPU-seconds received up to `changed_s`
    "memory_a",  #: what the policy remembers of the job; each policy says what it keeps here
    "memory_b",
    "memory_c",
)
_INTS = (
    "user",  #: index of the owner
    "min_gpus",
    "max_gpus",  #: what it can use at most: its range, its profile and the cluster
    "requested_gpus",
    "gpus",  #: its share now
    "gpu_type",  #: the type of its share now, -1 without one
    "servers",  #: parameter servers of its share now
    "is_ps",  #: 1 for parameter-server jobs
    "starts",  #: how often it went from no share to some
    "changes",  #: how often its share changed
    "generation",  #: version of its set of workers
)


class SpeedTables:
    """Speed curves of all profiles seen, end to end in one array, so that kernels can index them."""

    def __init__(self, gpu_types: tuple[str, ...]) -> None:
        self.gpu_types = gpu_types
        self.values: FloatArray = np.zeros(1024)
        self._end = 1  # offset 0 is the curve of length one that never runs
        self._rows: dict[int, tuple[Profile, IntArray, IntArray]] = {}
        self._curves: dict[bytes, int] = {}

    def rows(self, profile: Profile) -> tuple[IntArray, IntArray]:
        """(offset, longest share) of the profile's curve for each GPU type of the cluster."""
        known = self._rows.get(id(profile))
        if known is None:
            at = np.zeros(len(self.gpu_types), np.int32)
            longest = np.zeros(len(self.gpu_types), np.int32)
            for i, gpu_type in enumerate(self.gpu_types):
                if profile.knows(gpu_type):
                    speed = profile.curve(gpu_type).speed
                    at[i], longest[i] = self._append(speed), len(speed) - 1
            # The profile is kept with its rows, so that its id cannot be used again by another.
            known = self._rows[id(profile)] = (profile, at, longest)
        return known[1], known[2]

    def _append(self, speed: FloatArray) -> int:
        key = speed.tobytes()
        at = self._curves.get(key)
        if at is not None:
            return at
        at, end = self._end, self._end + len(speed)
        if end > len(self.values):
            grown = np.zeros(max(2 * len(self.values), end))
            grown[: self._end] = self.values[: self._end]
            self.values = grown
        self.values[at:end] = speed
        self._end = end
        self._curves[key] = at
        return at


class View:
    """One row per active job. `job_ids` ascends, so a job's row is found by bisection."""

    job_ids: NDArray[np.int64]
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
    memory_a: FloatArray
    memory_b: FloatArray
    memory_c: FloatArray
    user: IntArray
    min_gpus: IntArray
    max_gpus: IntArray
    requested_gpus: IntArray
    gpus: IntArray
    gpu_type: IntArray
    servers: IntArray
    is_ps: IntArray
    starts: IntArray
    changes: IntArray
    generation: IntArray
    #: [gpu type, row]: where the job's speed curve for that type begins in `speeds`; 0 if it may not use it
    speed_at: IntArray
    #: [gpu type, row]: the largest share on that type that the job can use; 0 if it may not use it
    type_max: IntArray

    def __init__(self, gpu_types: tuple[str, ...], total_gpus: int) -> None:
        self.gpu_types = gpu_types
        self.total_gpus = total_gpus
        self.tables = SpeedTables(gpu_types)
        self.n = 0
        types = len(gpu_types)
        self._ids: NDArray[np.int64] = np.zeros(64, np.int64)
        self._floats: FloatArray = np.zeros((len(_FLOATS), 64))
        self._ints: IntArray = np.zeros((len(_INTS) + 2 * types, 64), np.int32)
        self._slice()

    def __len__(self) -> int:
        return self.n

    @property
    def speeds(self) -> FloatArray:
        """All speed curves end to end: job `row` runs at `speeds[speed_at[t, row] + gpus]` on type `t`."""
        return self.tables.values

    def _slice(self) -> None:
        n = self.n
        self.job_ids = self._ids[:n]
        for i, name in enumerate(_FLOATS):
            setattr(self, name, self._floats[i, :n])
        for i, name in enumerate(_INTS):
            setattr(self, name, self._ints[i, :n])
        types = len(self.gpu_types)
        self.speed_at = self._ints[len(_INTS) : len(_INTS) + types, :n]
        self.type_max = self._ints[len(_INTS) + types :, :n]

    def _grow(self) -> None:
        def double(a: NDArray[np.generic]) -> NDArray[np.generic]:
            return np.concatenate([a, np.zeros_like(a)], axis=-1)

        self._ids = double(self._ids)  # type: ignore[assignment]
        self._floats = double(self._floats)  # type: ignore[assignment]
        self._ints = double(self._ints)  # type: ignore[assignment]

    def row(self, job_id: int) -> int:
        """The row of an active job; KeyError if there is none."""
        row = int(np.searchsorted(self.job_ids, job_id))
        if row == self.n or self.job_ids[row] != job_id:
            raise KeyError(job_id)
        return row

    def __contains__(self, job_id: int) -> bool:
        row = int(np.searchsorted(self.job_ids, job_id))
        return row < self.n and bool(self.job_ids[row] == job_id)

    def add(self, job_id: int, job: Job, profile: Profile, user: int, now_s: float) -> int:
        """Append a job that has just been submitted; its id must be above all before it."""
        n = self.n
        if n and job_id <= self.job_ids[-1]:
            raise ValueError(f"job ids must ascend: {job_id} after {int(self.job_ids[-1])}")
        if n == len(self._ids):
            self._grow()
        self.n = n + 1
        self._slice()
        self._ids[n] = job_id
        self._floats[:, n] = 0.0
        self._ints[:, n] = 0
        self.submit_s[n] = job.submit_s
        self.weight[n] = job.weight
        self.total[n] = self.remaining[n] = np.nan if job.iterations is None else job.iterations
        self.settled_s[n] = self.changed_s[n] = now_s
        self.first_start_s[n] = self.last_start_s[n] = np.inf
        self.user[n] = user
        self.min_gpus[n] = job.gpus.min
        self.requested_gpus[n] = job.requested_gpus
        self.gpu_type[n] = -1
        self.is_ps[n] = job.kind is Kind.PARAMETER_SERVER
        self.set_profile(n, job, profile)
        return n

    def set_profile(self, row: int, job: Job, profile: Profile) -> None:
        """Let the row use this profile from now on, on the types the job allows."""
        at, longest = self.tables.rows(profile)
        allowed = np.array([not job.gpu_types or t in job.gpu_types for t in self.gpu_types])
        self.speed_at[:, row] = np.where(allowed, at, 0)
        limit = min(job.gpus.max, self.total_gpus)
        for t in range(len(self.gpu_types)):
            self.type_max[t, row] = self._useful(at[t], min(int(longest[t]), limit)) if allowed[t] else 0
        self.max_gpus[row] = int(self.type_max[:, row].max())
        if self.max_gpus[row] < job.gpus.min:
            raise ShoalError(
                f"job {job.name!r} needs {job.gpus.min} GPUs at least, but by its profile and its GPU types "
                f"no more than {int(self.max_gpus[row])} are of use; lower its min or measure a larger share"
            )

    def _useful(self, at: int, longest: int) -> int:
        """The smallest share that is as fast as any up to `longest`: more would only slow the job down."""
        return int(np.argmax(self.speeds[at : at + longest + 1]))

    def remove(self, job_id: int) -> None:
        """Close up over the row of a job that has left."""
        row, n = self.row(job_id), self.n
        self._ids[row : n - 1] = self._ids[row + 1 : n]
        self._floats[:, row : n - 1] = self._floats[:, row + 1 : n]
        self._ints[:, row : n - 1] = self._ints[:, row + 1 : n]
        self.n = n - 1
        self._slice()

    def park(self, job_id: int) -> tuple[FloatArray, IntArray]:
        """Take a job out of the view for a while; what is known of it is returned for `unpark`."""
        row = self.row(job_id)
        kept = self._floats[:, row].copy(), self._ints[:, row].copy()
        self.remove(job_id)
        return kept

    def unpark(self, job_id: int, kept: tuple[FloatArray, IntArray]) -> None:
        """Put a parked job back at its place in the order of submission."""
        n = self.n
        if n == len(self._ids):
            self._grow()
        row = int(np.searchsorted(self.job_ids, job_id))
        self._ids[row + 1 : n + 1] = self._ids[row:n].copy()
        self._floats[:, row + 1 : n + 1] = self._floats[:, row:n].copy()
        self._ints[:, row + 1 : n + 1] = self._ints[:, row:n].copy()
        self._ids[row] = job_id
        self._floats[:, row], self._ints[:, row] = kept
        self.n = n + 1
        self._slice()

    def remaining_now(self, now_s: float) -> FloatArray:
        """Iterations left at `now_s`, by what was last settled and the rate since."""
        done = self.rate * np.maximum(now_s - self.settled_s, 0.0)
        return np.maximum(self.remaining - done, 0.0)

    def attained_now(self, now_s: float) -> FloatArray:
        """GPU-seconds received up to `now_s`."""
        return self.attained_gpu_s + self.gpus * (now_s - self.changed_s)
