"""Profiles learned online: speed models fitted to noisy step times of running jobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from shoal.core.arrays import FloatArray
from shoal.core.cluster import Cluster
from shoal.core.job import Job, Kind
from shoal.core.profile import ANY_TYPE, Profile, SpeedCurve, Uncertainty
from shoal.knowledge.online_speed import OnlineSpeed, server_worker_table
from shoal.knowledge.plain_speed import plain_speed
from shoal.knowledge.speed_estimator import SpeedEstimator
from shoal.knowledge.speed_models import SYNC_PS
from shoal.knowledge.speed_prior import assumed_speed
from shoal.knowledge.unknown import Unknown
from shoal.sim.known_profiles import KnownProfiles

#: Prior of parameter-server jobs before any measurement: a speed-up of n^0.8, and one iteration per second on one GPU.
SCALING = 0.8
#: Placements on more nodes are assumed to be as slow as on this many.
MOST_NODES = 8


class LearnedProfiles(KnownProfiles):
    """One learner per model, so that jobs of a model learn from each other."""

    measure_after_s = 30.0

    def __init__(
        self,
        jobs: Sequence[Job],
        profiles: Sequence[Profile],
        cluster: Cluster,
        noise: float,
        rng: np.random.Generator,
    ) -> None:
        super().__init__(jobs, profiles)
        self.noise = noise
        self.rng = rng
        self._learners: dict[str, _Workers | _Servers] = {}
        for job, profile in zip(jobs, profiles):
            if job.model not in self._learners:
                with_servers = profile.by_servers is not None and job.kind is Kind.PARAMETER_SERVER
                self._learners[job.model] = (_Servers if with_servers else _Workers)(profile, cluster)

    def profile(self, j: int) -> Profile:
        return self._learners[self.jobs[j].model].estimate_for(self.jobs[j].gpus.min)

    def measure(self, j: int, gpus: int, nodes: int, gpu_type: str, rate: float, servers: int = 0) -> bool:
        seconds = float(np.exp(self.rng.normal(0.0, self.noise))) / rate
        return self._learners[self.jobs[j].model].learn(gpus, max(nodes, 1), gpu_type, servers, seconds)


class _Workers:
    """Speed by GPUs, nodes and type, with the all-reduce model."""

    def __init__(self, profile: Profile, cluster: Cluster) -> None:
        longest = max(c[0].max_gpus for c in profile.curves.values())
        self.gpu_types = cluster.gpu_types
        #: Numbers of nodes with a curve of their own; none in a pool.
        self.nodes = () if cluster.pooled else range(1, min(len(cluster.nodes), longest, MOST_NODES) + 1)
        self.estimator = SpeedEstimator(longest, int(cluster.gpus_of_node.max()))
        self.estimate = Profile(profile.model, {ANY_TYPE: {0: SpeedCurve(assumed_speed(longest))}})
        self._for_min: dict[int, Profile] = {}

    def estimate_for(self, min_gpus: int) -> Profile:
        """The estimate for a job with this minimum: see `plain_speed`."""
        if min_gpus not in self._for_min:
            known = self.estimate
            curves = {
                t: {
                    n: SpeedCurve(plain_speed(c.speed, min_gpus)) if n == 0 else c
                    for n, c in by_nodes.items()
                }
                for t, by_nodes in known.curves.items()
            }
            self._for_min[min_gpus] = Profile(known.model, curves, uncertain=known.uncertain)
        return self._for_min[min_gpus]

    def learn(self, gpus: int, nodes: int, gpu_type: str, servers: int, seconds: float) -> bool:
        self.estimator.observe(gpus, nodes, gpu_type, seconds)
        curves: dict[str, Mapping[int, SpeedCurve]] = {}
        uncertain: dict[str, Uncertainty] = {}
        for known_type in self.gpu_types:
            table = self.estimator.table(known_type)
            if isinstance(table, Unknown):
                continue
            speed = _filled(np.nan_to_num(table.iterations_per_s, nan=0.0))
            if speed is not None:
                spread = {n: SpeedCurve(self.estimator.spread(known_type, n)) for n in self.nodes}
                curves[known_type] = {0: SpeedCurve(speed), **spread}
                known = self.estimator.uncertainty(known_type)
                if not isinstance(known, Unknown):
                    uncertain[known_type] = known
        if not curves:
            return False
        self._for_min.clear()
        fallback = next(iter(curves.values()))
        self.estimate = Profile(self.estimate.model, {ANY_TYPE: fallback, **curves}, uncertain=uncertain)
        return True


def _filled(speed: FloatArray) -> FloatArray | None:
    """Fill unknown speeds by extrapolating from the nearest known share; None if none is known."""
    known = np.flatnonzero(speed[1:] > 0) + 1
    if not len(known):
        return None
    shares = np.arange(len(speed))
    near = known[np.abs(shares[:, None] - known).argmin(axis=1)]
    return np.where(speed > 0, speed, speed[near] * (shares / near) ** SCALING)


class _Servers:
    """Speed by servers and workers, with Optimus' model of synchronous training."""

    def __init__(self, profile: Profile, cluster: Cluster) -> None:
        assert profile.by_servers is not None
        self.most_servers, self.most_workers = profile.by_servers.shape
        self.online = OnlineSpeed(SYNC_PS)
        ps, workers = 1.0 + np.arange(self.most_servers), 1.0 + np.arange(self.most_workers)
        # The prior lets more servers help a little: otherwise the policy would never try a second one.
        self.estimate = Profile.of_servers(profile.model, np.outer(ps**0.2, workers ** (SCALING - 0.2)))

    def estimate_for(self, min_gpus: int) -> Profile:
        return self.estimate

    def learn(self, gpus: int, nodes: int, gpu_type: str, servers: int, seconds: float) -> bool:
        if servers < 1:
            return False
        self.online.observe((float(servers), float(gpus), 1.0), seconds)
        table = server_worker_table(self.online, self.most_servers, self.most_workers, 1.0)[1:, 1:]
        if not (np.isfinite(table).all() and (table > 0).all()):
            return False
        self.estimate = Profile.of_servers(self.estimate.model, table)
        return True
