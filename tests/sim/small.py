"""Small inputs, made by hand."""

from __future__ import annotations

from shoal.core.cluster import Cluster
from shoal.core.job import GpuRange, Job
from shoal.core.profile import Profile
from shoal.policies.registry import make_policy
from shoal.sim.engine import Simulation

LINEAR = Profile.of("linear", {n: 1.0 / n for n in range(1, 17)})
FLAT = Profile.of("flat", {1: 1.0})
PROFILES = {"linear": LINEAR, "flat": FLAT}


def job(name, submit_s, iterations, gpus=1, most=None, model="linear", **more):
    most = most or gpus
    return Job(
        name, submit_s, GpuRange(more.pop("least", 1), most), gpus, model=model, iterations=iterations, **more
    )


def simulate(jobs, policy, gpus=4, cluster=None, options=None, profiles=PROFILES, **more):
    simulation = Simulation(
        jobs, profiles, cluster or Cluster.pool(gpus), make_policy(policy, options or {}), **more
    )
    return simulation.run()
