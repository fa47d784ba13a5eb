"""Load the inputs of a simulation, run it, and compute its figures: `shoal sim run` and `compare`."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from traceback import walk_tb
from types import MappingProxyType
from typing import Any

import numpy as np

from shoal.core.cluster import Cluster
from shoal.core.errors import ShoalError
from shoal.core.job import Job, Kind
from shoal.core.profile import ANY_TYPE, Interpolation, Profile
from shoal.core.words import listed
from shoal.knowledge.marginal_utility import right_share
from shoal.knowledge.unknown import Unknown
from shoal.placement.placer import Placer
from shoal.placement.preschedule import PreRule
from shoal.placement.ps_speed import is_measured
from shoal.placement.registry import Setting, make_placer
from shoal.placement.sharing import SharingRule
from shoal.policies.base import Policy
from shoal.policies.registry import make_policy, policy_class
from shoal.sim.compiling import compiling
from shoal.sim.costs import MEASURED_RESTART_S, Costs
from shoal.sim.engine import Progress, Simulation
from shoal.sim.inputs import cluster_with_users_of, read_cluster, read_jobs, read_profiles
from shoal.sim.inputs.column_values import MOST_GPUS
from shoal.sim.inputs.model_pool import common_type
from shoal.sim.inputs.needs_file import jobs_without, read_uses
from shoal.sim.interrupts import heeded
from shoal.sim.known_profiles import Knowledge
from shoal.sim.run_record import RunRecord
from shoal.sim.sharing_simulation import SharingSimulation, Use
from shoal.sim.summary import summary


@dataclass(frozen=True)
class Setup:
    """Everything that a run depends on. The same setup gives the same result."""

    jobs: Path
    profiles: Path
    policy: str
    #: A name, and options after colons (see `placement.registry`).
    placement: str = "auto"
    gpus: int | None = None
    cluster: Path | None = None
    options: dict[str, str] = field(default_factory=dict)
    seed: int = 0
    costs: Costs = field(default_factory=Costs)
    knowledge: Knowledge = field(default_factory=Knowledge)
    whole_seconds: bool = False
    interpolation: Interpolation = "time"
    timeline: bool = True
    #: Jobs request the number of GPUs that their profile makes worthwhile, not that of the trace.
    auto_gpus: bool = False
    #: The autoscaler of jobs that do not name one; empty for none.
    autoscale: str = ""
    #: How a worker of each model uses its GPU (needs.csv), for co-location and pre-scheduling.
    needs: Path | None = None
    share: bool = False
    pre_schedule: bool = False
    #: Whether parameter servers run on a node of their own instead of beside their workers.
    servers_apart: bool = False

    def described(self) -> dict[str, Any]:
        """The setup as plain data, without options that are not set."""
        costs = {"none": (), "restart": ("restart_s",), "concurrent": ("prepare_s", "pause_s")}
        seconds = costs.get(self.costs.kind, ("resume_s", "migrate_s"))
        own = self.costs.restart_by_model if self.costs.kind == "restart" else {}
        by_model = (
            {f"restart_s of {model}": s for model, s in own.items()} if own != MEASURED_RESTART_S else {}
        )
        all_of_it = {
            "jobs": str(self.jobs),
            "profiles": str(self.profiles),
            "gpus": self.gpus,
            "cluster": str(self.cluster) if self.cluster else None,
            "options": self.options,
            "seed": self.seed,
            "placement": self.placement,
            "costs": {
                "kind": self.costs.kind,
                **{name: getattr(self.costs, name) for name in seconds},
                **by_model,
            },
            "knowledge": str(self.knowledge),
            "interpolate": self.interpolation,
            "whole_seconds": self.whole_seconds,
            "auto_gpus": self.auto_gpus,
            "autoscale": self.autoscale,
            "needs": str(self.needs) if self.needs else None,
            "share": self.share,
            "pre_schedule": self.pre_schedule,
            "servers": "apart" if self.servers_apart else None,
        }
        return {name: value for name, value in all_of_it.items() if value or name in ("options", "seed")}


@dataclass(frozen=True)
class Inputs:
    jobs: tuple[Job, ...]
    profiles: dict[str, Profile]
    cluster: Cluster
    #: How a worker of each model uses its GPU, if the setup has a needs file.
    uses: Mapping[str, Use] | None = None


@dataclass(frozen=True)
class Result:
    summary: dict[str, Any]
    record: RunRecord
    inputs: Inputs


def load(setup: Setup) -> Inputs:
    """Read and check the files of a setup."""
    if (setup.gpus is None) == (setup.cluster is None):
        raise ShoalError("give the size of the cluster: --gpus N, or --cluster FILE (one of the two)")
    if setup.needs is None and (setup.share or setup.pre_schedule):
        raise ShoalError("say how jobs use their GPUs: --needs FILE (model,gpu_util,gpu_mem_mb)")
    profiles = read_profiles(setup.profiles, setup.interpolation)
    cluster = read_cluster(setup.cluster) if setup.cluster else _pool(setup.gpus or 0, profiles)
    jobs = read_jobs(setup.jobs, profiles, cluster, setup.profiles)
    if setup.auto_gpus:
        jobs = tuple(_with_right_share(job, profiles[job.model], cluster) for job in jobs)
    if setup.autoscale:
        jobs = tuple(job if job.autoscale else replace(job, autoscale=setup.autoscale) for job in jobs)
    uses = read_uses(setup.needs, profiles) if setup.needs else None
    return Inputs(jobs, profiles, cluster_with_users_of(cluster, jobs), uses)


def _with_right_share(job: Job, profile: Profile, cluster: Cluster) -> Job:
    """The job with the request of Liquid's `--gpus auto`: the last GPU that still adds half the speed of one GPU.

    On a mixed cluster, the first GPU type that the job may use counts. A job without a speed on one GPU keeps its
    request, because gains cannot be compared.
    """
    allowed = [t for t in job.gpu_types or cluster.gpu_types if t in cluster.gpu_types and profile.knows(t)]
    speed = profile.curve(allowed[0]).speed
    found = right_share(np.where(speed > 0, speed, np.nan), min_gpus=job.gpus.min, max_gpus=job.gpus.max)
    if isinstance(found, Unknown):
        return job
    return replace(job, requested_gpus=max(job.gpus.floor(found.gpus), job.gpus.min))


def _pool(gpus: int, profiles: dict[str, Profile]) -> Cluster:
    """A pool of the GPU type that is common to the profiles."""
    if not 1 <= gpus <= MOST_GPUS:
        raise ShoalError(f"--gpus {gpus}: a cluster has at least one GPU and at most {MOST_GPUS:,}")
    return Cluster.pool(gpus, common_type(profiles))


def check(setup: Setup, cluster: Cluster) -> None:
    """Check the policy's options and the placement of a setup before a run."""
    _policy_of(setup)
    make_placer(setup.placement, Setting(cluster))


def _policy_of(setup: Setup) -> Policy:
    with _failing_by_itself(policy_class(setup.policy)):
        return make_policy(setup.policy, setup.options, setup.seed)


def remarks(setup: Setup, inputs: Inputs) -> list[str]:
    """Notes about options of a setup that have no effect, one line each."""
    notes = []
    if setup.placement != "auto" and not _place_matters(inputs):
        notes.append(
            "no profile gives speed by nodes: the placement decides which jobs fit, not how fast they run"
        )
    types, pool = {t for p in inputs.profiles.values() for t in p.gpu_types}, inputs.cluster.gpu_types[0]
    if setup.gpus and pool in types and len(types) > 1:
        notes.append(
            f"the profiles have speeds for {listed(sorted(types - {ANY_TYPE}))}; --gpus {setup.gpus} is a pool of "
            f"{pool}; use --cluster to describe other GPUs"
        )
    asked = setup.autoscale or any(job.autoscale for job in inputs.jobs)
    if asked and not policy_class(setup.policy).elastic:
        notes.append(f"policy {setup.policy} does not resize jobs: the autoscaler has no effect")
    if inputs.uses is not None and (without := jobs_without(inputs.uses, inputs.jobs)):
        notes.append(without)
    return notes


def _place_matters(inputs: Inputs) -> bool:
    """Whether the speed of any job depends on its placement."""
    used = {(job.model, job.kind) for job in inputs.jobs}
    return not inputs.cluster.pooled and any(
        inputs.profiles[model].tells_nodes or (kind is Kind.PARAMETER_SERVER and is_measured(model))
        for model, kind in used
    )


class _EstimatedProfiles:
    """The scheduler's profiles, for the placer, which is made before the scheduler."""

    profiles: Mapping[int, Profile] = MappingProxyType({})

    def __call__(self) -> Mapping[int, Profile]:
        return self.profiles


def placer_for(
    setup: Setup, cluster: Cluster, policy: Policy, estimates: Callable[[], Mapping[int, Profile]]
) -> Placer:
    """The placer of a setup. The cost of a move is that of the cost model."""
    setting = Setting(
        cluster, policy.elastic, estimates, setup.costs.move_s, setup.servers_apart, policy=policy.name
    )
    return make_placer(setup.placement, setting)


def _make_simulation(setup: Setup, inputs: Inputs) -> Callable[..., Simulation]:
    """The engine, or its extension with co-location and pre-scheduling."""
    if inputs.uses is None:
        return Simulation
    return partial(
        SharingSimulation,
        uses=inputs.uses,
        share=SharingRule() if setup.share else None,
        early=PreRule() if setup.pre_schedule else None,
    )


def run(
    setup: Setup,
    progress: Progress | None = None,
    inputs: Inputs | None = None,
    compiles: Callable[[], None] | None = None,
) -> Result:
    """Run one policy over one trace. `compiles` is called if the first use has to compile kernels.

    After Ctrl-C the record holds the results so far, and `interrupted` is set.
    """
    inputs = inputs or load(setup)
    policy = _policy_of(setup)
    estimates = _EstimatedProfiles()
    simulation = _make_simulation(setup, inputs)(
        inputs.jobs,
        inputs.profiles,
        inputs.cluster,
        policy,
        placer=placer_for(setup, inputs.cluster, policy, estimates),
        costs=setup.costs,
        knowledge=setup.knowledge,
        seed=setup.seed,
        whole_seconds=setup.whole_seconds,
        timeline=setup.timeline,
        servers_apart=setup.servers_apart,
    )
    estimates.profiles = simulation.scheduler.profiles
    began = time.perf_counter()
    with compiling(compiles) as compiled, _failing_by_itself(type(policy)), heeded() as interrupt:
        record = simulation.run(progress, interrupt=interrupt)
    record.wall_s = time.perf_counter() - began - compiled.seconds
    figures = summary(record, inputs.profiles, inputs.cluster.gpu_types[0])
    figures["compile_s"] = compiled.seconds
    figures["peak_memory_mb"] = peak_memory_mb()
    figures["placement"] = setup.placement
    figures["setup"] = setup.described() | ({"gpu_type": inputs.cluster.gpu_types[0]} if setup.gpus else {})
    return Result(figures, record, inputs)


@contextmanager
def _failing_by_itself(policy: type[Policy]) -> Iterator[None]:
    """Report an exception of a third-party policy in one line, with its place in the source."""
    try:
        yield
    except Exception as error:
        if isinstance(error, ShoalError) or policy.__module__.startswith("shoal."):
            raise
        *_, (frame, line) = walk_tb(error.__traceback__)
        where = f"{frame.f_code.co_filename}:{line}"
        raise ShoalError(
            f"policy {policy.name!r} failed at {where} with {type(error).__name__}: {error}"
        ) from error


def peak_memory_mb() -> float:
    """The peak memory of this process."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1 << 20 if sys.platform == "darwin" else 1 << 10)
