"""Profiling while jobs run: samples from the view, and visits to GPU types without samples."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.core.arrays import FloatArray, IntArray
from shoal.core.view import View
from shoal.policies.gandiva_fair.profiling import Profiles, Rules

#: Placeholder for an unknown speed on a type that the job can use. Lower than all measured speeds.
_UNKNOWN = 1e-12


class Measuring:
    """Profiles by user or by job from the rates of running jobs, or with "given" the profiles of the jobs."""

    def __init__(self, by: str, visit_s: float, visits: int, rules: Rules | None = None) -> None:
        self.by = by
        self.visit_s = visit_s
        self.most = visits
        self.profiles = Profiles(rules or Rules())
        #: Current visits: job -> (type, end time).
        self.visiting: dict[int, tuple[int, float]] = {}

    @property
    def under_way(self) -> bool:
        return bool(self.visiting)

    def _key(self, view: View, row: int) -> str:
        return str(int(view.user[row]) if self.by == "user" else int(view.job_ids[row]))

    def speeds(self, view: View, can_run: FloatArray, now_s: float) -> FloatArray:
        """[type, row]: measured speed of the gang; 0 where it cannot run."""
        if self.by == "given":
            return can_run
        self._sample(view, now_s)
        known = self._means(view, len(can_run)) * view.requested_gpus
        return np.where(can_run > 0, np.where(np.isnan(known), _UNKNOWN, known), 0.0)

    def _means(self, view: View, types: int) -> FloatArray:
        """[type, row]: measured speed of one GPU; nan where it was not measured."""
        keys, at = np.unique(view.user if self.by == "user" else view.job_ids, return_inverse=True)
        means = np.full((types, len(keys)), np.nan)
        for k, key in enumerate(keys.tolist()):
            for t, m in self.profiles.known.get(str(key), {}).items():
                means[t, k] = m.mean
        return np.asarray(means[:, at])

    def _sample(self, view: View, now_s: float) -> None:
        """Take one sample for each key and type that needs one, from a job that runs at a steady rate.

        If the rate of a job contradicts its profile, the job has changed and its profile is measured again.
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
                self.profiles.forget(key)  # its speed on other types may have changed too
            if self.profiles.lacking(key, (t,), now_s):
                self.profiles.observe(key, t, speed, now_s)

    def of_users(self, view: View, can_run: FloatArray, users: int) -> FloatArray:
        """[user, type]: speed of one GPU for the user's jobs; nan unless all of them were measured."""
        each = np.where(can_run > 0, np.log(self._means(view, len(can_run))), np.nan)
        logs = np.stack([np.bincount(view.user, weights=x, minlength=users) for x in each], axis=1)
        jobs = np.bincount(view.user, minlength=users)
        return np.where(jobs[:, None] > 0, np.exp(logs / np.maximum(jobs, 1)[:, None]), np.nan)

    def send(self, view: View, types: IntArray, speed: FloatArray, now_s: float) -> dict[int, int]:
        """{row: type} of the visits that start now. Ends visits that have enough samples."""
        if self.by == "given":
            return {}
        for job, (t, until_s) in list(self.visiting.items()):
            key = self._key(view, view.row(job)) if job in view else ""
            if not key or now_s >= until_s or not self.profiles.lacking(key, (t,), now_s):
                del self.visiting[job]
        small_first = np.argsort(view.requested_gpus, kind="stable").tolist()
        keys = (view.user if self.by == "user" else view.job_ids).tolist()
        ids, may_run = view.job_ids.tolist(), (speed > 0).T.tolist()
        jobs = [
            (ids[row], str(keys[row]), tuple(t for t, may in enumerate(may_run[row]) if may))
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
        """Measured speeds of one GPU and their spread, by user or job."""
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
