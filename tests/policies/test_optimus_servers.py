"""Optimus in full: parameter servers and workers compete by marginal gain."""

from __future__ import annotations

import numpy as np
import pytest

from shoal.core.cluster import Cluster
from shoal.core.errors import InputError
from shoal.core.events import Submitted
from shoal.core.job import GpuRange, Job, Kind
from shoal.core.profile import Profile
from shoal.policies.optimus.parameter_servers import sync_speed
from shoal.policies.registry import make_policy
from shoal.scheduler.scheduler import Scheduler
from shoal.sim.engine import Simulation
from shoal.sim.inputs import read_profiles

#: Transfer-bound (servers help) and compute-bound (they do not): θ0..θ4 of the synchronous model.
BUSY_NETWORK = sync_speed(np.array([[0.5, 0.1, 1.0, 0.01, 0.01]]), np.array([1.0]), 8, 8)[0]
COMPUTE = sync_speed(np.array([[4.0, 0.1, 0.01, 0.001, 0.05]]), np.array([1.0]), 8, 8)[0]


def ps_job(name, work=1000.0, least=1):
    return Job(name, 0.0, GpuRange(least, 8), least, model=name, iterations=work, kind=Kind.PARAMETER_SERVER)


def decide(jobs, profiles, gpus, **options):
    scheduler = Scheduler(Cluster.pool(gpus), make_policy("optimus", options))
    scheduler.step(0.0, [Submitted(i, job, profiles[job.model]) for i, job in enumerate(jobs)])
    return [(int(s), int(w)) for s, w in zip(scheduler.view.servers, scheduler.view.gpus)]


def test_a_job_whose_network_is_busy_gets_more_servers_than_one_that_computes():
    profiles = {
        "busy": Profile.of_servers("busy", BUSY_NETWORK),
        "compute": Profile.of_servers("compute", COMPUTE),
    }
    (servers_busy, workers_busy), (servers, workers) = decide(
        [ps_job("busy"), ps_job("compute")], profiles, 8
    )
    assert servers_busy / workers_busy > servers / workers
    assert workers > workers_busy
    assert workers + workers_busy <= 8


def test_there_are_no_more_servers_than_the_cpus_have_room_for():
    profiles = {"busy": Profile.of_servers("busy", BUSY_NETWORK)}
    (few, _), (many, _) = decide([ps_job("busy")], profiles, 8, servers_per_gpu="0.25")[0:1] + decide(
        [ps_job("busy")], profiles, 8
    )
    assert few <= 2 < many


def test_all_reduce_jobs_take_part_and_have_no_servers():
    profiles = {
        "busy": Profile.of_servers("busy", BUSY_NETWORK),
        "plain": Profile.of("plain", {n: 4.0 / n for n in range(1, 9)}),
    }
    plain = Job("plain", 0.0, GpuRange(1, 8), 1, model="plain", iterations=1000.0)
    shares = decide([ps_job("busy"), plain], profiles, 8)
    assert shares[1][0] == 0
    assert shares[1][1] >= 1
    assert sum(w for _, w in shares) == 8


def test_a_gang_starts_complete_or_not_at_all():
    profiles = {"busy": Profile.of_servers("busy", BUSY_NETWORK)}
    first, second = decide([ps_job("busy", least=3), ps_job("busy", least=3)], profiles, 5)
    assert first[1] >= 3
    assert second == (0, 0)


def test_the_simulator_runs_it_at_the_speed_of_its_servers_and_workers():
    profiles = {"busy": Profile.of_servers("busy", BUSY_NETWORK)}
    job = ps_job("busy")
    record = Simulation(
        [job], profiles, Cluster.pool(4), make_policy("optimus", {"young_progress": "0"})
    ).run()
    servers, workers = decide([job], profiles, 4)[0]
    assert record.finish_s[0] == pytest.approx(job.iterations / BUSY_NETWORK[servers - 1, workers - 1])
    even = Simulation([job], profiles, Cluster.pool(4), make_policy("max-min")).run()
    assert record.finish_s[0] <= even.finish_s[0]


def test_profiles_with_servers_are_read_fitted_and_checked(tmp_path):
    path = tmp_path / "profiles.csv"
    rows = [(s, w) for s in (1, 2, 4, 8) for w in (1, 2, 8)]
    lines = [f"busy,{w},{1 / BUSY_NETWORK[s - 1, w - 1]:.9f},{s}" for s, w in rows]
    path.write_text("model,gpus,seconds_per_iteration,servers\n" + "\n".join(lines) + "\n")
    profile = read_profiles(path)["busy"]
    np.testing.assert_allclose(profile.by_servers, BUSY_NETWORK, rtol=0.05)
    path.write_text("model,gpus,seconds_per_iteration,servers\nbusy,1,2.0,1\nbusy,4,1.5,4\n")
    with pytest.raises(InputError, match="5 or more"):
        read_profiles(path)
    path.write_text("model,gpus,seconds_per_iteration,servers\nbusy,1,2.0,1\nbusy,2,1.5,\n")
    with pytest.raises(InputError, match="in all of its rows"):
        read_profiles(path)
