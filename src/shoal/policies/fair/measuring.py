"""Measuring while jobs run: samples from what the view shows, visits to types that still lack them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.core.view import View
from shoal.policies.fair.profiling import Profiles, Rules

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int32]

#: Speed that stands for "can run there, but nobody knows how fast": behind all that is known.
_UNKNOWN = 1e-12


class Measuring:
    """Profiles by user or by job, from the rates of running jobs; or, with "given", what jobs came with."""

    def __init__(self, by: str, visit_s: float, visits: int, rules: Rules | None = None) -> None:
        self.by = by
        self.visit_s = visit_s
        self.most = visits
        self.profiles = Profiles(rules or Rules())
        #: Visits under way: job -> (type, until).
        self.visiting: dict[int, tuple[int, float]] = {}

    @property
    def under_way(self) -> bool:
        return bool(self.visiting)

    def _key(self, view: View, row: int) -> str:
        return str(int(view.user[row]) if self.by == "user" else int(view.job_ids[row]))

    def speeds(self, view: View, can_run: FloatArray, now_s: float) -> FloatArray:
        """[type, row]: speed of the gang as far as it is known; 0 where it cannot run."""
        if self.by == "given":
            return can_run
        self._sample(view, now_s)
        known = np.full_like(can_run, _UNKNOWN)
        for row in range(len(view)):
            mine = self.profiles.known.get(self._key(view, row))
            for t, m in (mine or {}).items():
                known[t, row] = m.mean * view.requested_gpus[row]
        return np.where(can_run > 0, known, 0.0)

    def _sample(self, view: View, now_s: float) -> None:
        """One sample for each key and type that lacks some, from a job that runs at a settled pace.

        A job that runs at quite another pace than was measured has changed: it is measured anew.
        """
        steady = (view.gpus > 0) & (view.rate > 0) & (view.settled_s < now_s) & (view.changed_s < now_s)
        done = set()
        for row in np.flatnonzero(steady).tolist():
            key, t = self._key(view, row), int(view.gpu_type[row])
            if (key, t) in done:
                continue
            done.add((key, t))
            speed = float(view.rate[row] / view.gpus[row])
            if self.profiles.rules.drifted(self.profiles.known.get(key, {}).get(t), speed, now_s):
                self.profiles.forget(key)  # on the other types it may be another one too
            if self.profiles.lacking(key, (t,), now_s):
                self.profiles.observe(key, t, speed, now_s)

    def of_users(self, view: View, can_run: FloatArray, users: int) -> FloatArray:
        """[user, type]: speed of one GPU for the user's jobs, nan unless it is known for all of them."""
        types = len(can_run)
        logs, jobs = np.zeros((users, types)), np.zeros(users)
        for row in range(len(view)):
            u, mine = int(view.user[row]), self.profiles.known.get(self._key(view, row), {})
            jobs[u] += 1
            for t in range(types):
                m = mine.get(t) if can_run[t, row] > 0 else None
                logs[u, t] += np.log(m.mean) if m else np.nan
        return np.where(jobs[:, None] > 0, np.exp(logs / np.maximum(jobs, 1)[:, None]), np.nan)

    def send(self, view: View, types: IntArray, speed: FloatArray, now_s: float) -> dict[int, int]:
        """{row: type} of the visits that begin now; ends those that have what they came for."""
        if self.by == "given":
            return {}
        for job, (t, until_s) in list(self.visiting.items()):
            key = self._key(view, view.row(job)) if job in view else ""
            if not key or now_s >= until_s or not self.profiles.lacking(key, (t,), now_s):
                del self.visiting[job]
        small_first = np.argsort(view.requested_gpus, kind="stable").tolist()
        jobs = [
            (int(view.job_ids[row]), self._key(view, row), tuple(np.flatnonzero(speed[:, row] > 0).tolist()))
            for row in small_first
        ]
        under_way = {job: t for job, (t, _) in self.visiting.items()}
        sent = {}
        for visit in self.profiles.visits(jobs, under_way, now_s, self.most):
            self.visiting[visit.job] = (visit.gpu_type, now_s + self.visit_s)
            row = view.row(visit.job)
            if types[row] != visit.gpu_type:
                sent[row] = visit.gpu_type
        return sent

    def rows_on_visit(self, view: View) -> NDArray[np.int64]:
        return np.array([view.row(job) for job in self.visiting if job in view], np.int64)

    def left(self, job_id: int) -> None:
        self.visiting.pop(job_id, None)
        if self.by == "job":
            self.profiles.forget(str(job_id))

    def report(self, gpu_types: tuple[str, ...], users: tuple[str, ...]) -> dict[str, Any]:
        """Measured speeds of one GPU with their spread, by user or job."""
        return {
            users[int(key)] if self.by == "user" else key: {
                gpu_types[t]: {
                    "speed": m.mean,
                    "spread": m.spread if m.samples > 1 else None,
                    "samples": m.samples,
                    "last_s": m.last_s,
                }
                for t, m in sorted(mine.items())
            }
            for key, mine in self.profiles.known.items()
        }

    def state(self) -> dict[str, Any]:
        return {
            "profiles": self.profiles.state(),
            "visiting": {str(j): [t, until] for j, (t, until) in self.visiting.items()},
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.profiles.restore(state["profiles"])
        self.visiting = {int(j): (int(t), until) for j, (t, until) in state["visiting"].items()}
