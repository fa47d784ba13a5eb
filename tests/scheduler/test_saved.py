"""A scheduler that is saved and restored before every step of a busy run ends it as one that goes on."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from shoal.core.cluster import Cluster, User
from shoal.core.job import GpuRange, Job
from shoal.core.profile import Profile
from shoal.core.view import View
from shoal.policies.registry import make_policy, policy_names
from shoal.scheduler.saved import restore, save
from shoal.scheduler.scheduler import Scheduler
from shoal.sim.engine import Simulation

GPUS = 8
USERS = ("ada", "ben", "cho")
PROFILE = Profile.of("m", {n: n**-0.8 for n in range(1, GPUS + 1)})
#: Turns short enough that many end while jobs run.
SHORT = {
    "tiresias-l": {"thresholds_gpu_s": "20,100", "promote": "2"},
    "tiresias-g": {"distribution_gpu_s": "5,50,500", "promote": "1"},
    "themis": {"lease_s": "20"},
    "afs-p": {"quantum_s": "15"},
    "gandiva-fair": {"quantum_s": "10"},
}


class Reborn:
    """A scheduler that forgets all but what it saves, before each step."""

    def __init__(self, scheduler: Scheduler, made: Any) -> None:
        self._now, self._made = scheduler, made

    def __getattr__(self, name: str) -> Any:
        return getattr(self._now, name)

    def step(self, now_s: float, events: Any) -> Any:
        was = self._now
        saved = json.loads(json.dumps(save(was)))
        self._now = restore(saved, was.cluster, self._made(), was.jobs, was.profiles)
        return self._now.step(now_s, events)


def run(name: str, seed: int, reborn: bool) -> tuple[list[float], int]:
    """When each job ends, and how often shares changed."""
    rng = np.random.default_rng(seed)
    jobs = []
    for i, at in enumerate(np.cumsum(rng.exponential(4.0, 50)).tolist()):
        most, user = int(rng.integers(1, 7)), str(rng.choice(USERS))
        work = float(rng.lognormal(3, 1))
        jobs.append(Job(f"j{i}", at, GpuRange(1, most), most, user, model="m", iterations=work))
    cluster = Cluster.pool(GPUS).with_users([User(user) for user in USERS])
    simulation = Simulation(jobs, {"m": PROFILE}, cluster, make_policy(name, SHORT.get(name, {}), seed=3))
    if reborn:
        made = Reborn(simulation.scheduler, lambda: make_policy(name, SHORT.get(name, {}), seed=99))
        simulation.scheduler = made  # type: ignore[assignment]
    record = simulation.run()
    return record.finish_s.tolist(), int(record.changes.sum())


@pytest.mark.parametrize("name", policy_names())
def test_being_saved_and_restored_before_every_step_changes_nothing(name: str) -> None:
    for seed in range(3):
        assert run(name, seed, reborn=True) == run(name, seed, reborn=False), f"seed {seed}"


@pytest.mark.parametrize("column", ["quantum_end_s", "quanta_used"])
def test_a_column_of_afs_p_that_is_not_restored_is_seen(column: str, monkeypatch: pytest.MonkeyPatch) -> None:
    load = View.load

    def forgetful(view: View, row: int, saved: Any) -> None:
        load(view, row, saved)
        view.column(column)[row] = 0.0

    monkeypatch.setattr(View, "load", forgetful)
    assert any(run("afs-p", seed, reborn=True) != run("afs-p", seed, reborn=False) for seed in range(3))
