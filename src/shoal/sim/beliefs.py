"""What the scheduler believes of a job's speed, beside the truth the simulator runs it with.

true: the profiles themselves. wrong: off by a given error, drawn once per job and share, and so is the work
that is left. learned: nothing is known at first; each time a job has trained a while at a share its step time
is measured with noise, and a speed model is fitted to what the jobs of the same model have shown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shoal.core.cluster import Cluster
from shoal.core.errors import ShoalError
from shoal.core.job import Job
from shoal.core.profile import ANY_TYPE, Profile, SpeedCurve
from shoal.knowledge.speed_estimator import SpeedEstimator
from shoal.knowledge.unknown import Unknown


@dataclass(frozen=True)
class Knowledge:
    """How much the scheduler knows: `true`, `wrong:0.3` (error), `learned:0.05` (noise of a measurement)."""

    kind: str = "true"
    error: float = 0.0

    @classmethod
    def parse(cls, word: str) -> Knowledge:
        kind, _, number = word.partition(":")
        default = {"true": 0.0, "wrong": 0.3, "learned": 0.05}
        if kind not in default:
            raise ShoalError(f"--knowledge {word}: say true, wrong:ERROR or learned:NOISE")
        try:
            error = float(number) if number else default[kind]
        except ValueError:
            raise ShoalError(f"--knowledge {word}: {number!r} is not a number") from None
        if not 0 <= error < 10 or (kind == "true" and number):
            raise ShoalError(f"--knowledge {word}: the error must be from 0 to 10, and true has none")
        return cls(kind, error)

    def __str__(self) -> str:
        return self.kind if self.kind == "true" else f"{self.kind}:{self.error:g}"


class Beliefs:
    """The truth: every profile and length is known."""

    #: Seconds a job trains at a share before it is measured; None: nothing is measured.
    measure_after_s: float | None = None

    def __init__(self, jobs: Sequence[Job], profiles: Sequence[Profile]) -> None:
        self.jobs = jobs
        self.profiles = profiles

    def profile(self, j: int) -> Profile:
        """What the scheduler is told of a job when it arrives."""
        return self.profiles[j]

    def remaining(self, j: int, left: float) -> float:
        """The work it is told is left."""
        return left

    def measure(self, j: int, gpus: int, nodes: int, gpu_type: str, rate: float) -> Profile | None:
        """A job has trained a while: what is believed of it now, None if nothing was learned."""
        return None


class WrongBeliefs(Beliefs):
    """Speeds and lengths off by a factor of log-normal size: about two in three are within the error."""

    def __init__(
        self, jobs: Sequence[Job], profiles: Sequence[Profile], error: float, rng: np.random.Generator
    ) -> None:
        super().__init__(jobs, profiles)
        sigma = np.log1p(error)
        self._length = np.exp(rng.normal(0.0, sigma, len(jobs)))
        seeds = rng.integers(1 << 63, size=len(jobs))
        self._believed = [self._distort(p, sigma, int(s)) for p, s in zip(profiles, seeds)]

    @staticmethod
    def _distort(profile: Profile, sigma: float, seed: int) -> Profile:
        rng = np.random.default_rng(seed)
        curves = {}
        for gpu_type, by_nodes in profile.curves.items():
            speed = by_nodes[0].speed
            # Errors at neighbouring shares go together, as those of a fitted curve do: a random tilt.
            n = np.maximum(np.arange(len(speed)), 1)
            tilt = rng.normal(0.0, sigma) * np.log(n) / max(np.log(len(speed)), 1.0)
            curves[gpu_type] = {0: SpeedCurve(speed * np.exp(tilt + rng.normal(0.0, sigma)))}
        return Profile(profile.model, curves)

    def profile(self, j: int) -> Profile:
        return self._believed[j]

    def remaining(self, j: int, left: float) -> float:
        return left * float(self._length[j])


class LearnedBeliefs(Beliefs):
    """One speed estimator per model, fed with noisy step times as jobs train."""

    measure_after_s = 30.0
    #: Before anything is measured: a speed-up of n^0.8, and one iteration per second on one GPU.
    SCALING = 0.8

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
        self.gpu_types = cluster.gpu_types
        per_node = int(cluster.gpus_of_node.max())
        self._estimators: dict[str, SpeedEstimator] = {}
        self._believed: dict[str, Profile] = {}
        for job, profile in zip(jobs, profiles):
            if job.model not in self._estimators:
                longest = max(c[0].max_gpus for c in profile.curves.values())
                self._estimators[job.model] = SpeedEstimator(longest, per_node)
                guess = np.arange(longest + 1, dtype=np.float64) ** self.SCALING
                self._believed[job.model] = Profile(job.model, {ANY_TYPE: {0: SpeedCurve(guess)}})

    def profile(self, j: int) -> Profile:
        return self._believed[self.jobs[j].model]

    def measure(self, j: int, gpus: int, nodes: int, gpu_type: str, rate: float) -> Profile | None:
        model = self.jobs[j].model
        estimator = self._estimators[model]
        seconds = float(np.exp(self.rng.normal(0.0, self.noise))) / rate
        estimator.observe(gpus, max(nodes, 1), gpu_type, seconds)
        believed = self._as_profile(model, estimator)
        if believed is not None:
            self._believed[model] = believed
        return believed

    def _as_profile(self, model: str, estimator: SpeedEstimator) -> Profile | None:
        curves: dict[str, Mapping[int, SpeedCurve]] = {}
        for gpu_type in self.gpu_types:
            table = estimator.table(gpu_type)
            if isinstance(table, Unknown):
                continue
            speed = np.nan_to_num(table.iterations_per_s, nan=0.0)
            known = np.flatnonzero(speed[1:] > 0) + 1
            if len(known):
                shares = np.arange(len(speed))
                # Where the fit says nothing the guess goes on from the nearest share that is known.
                near = known[np.abs(shares[:, None] - known).argmin(axis=1)]
                guess = speed[near] * (shares / near) ** self.SCALING
                curves[gpu_type] = {0: SpeedCurve(np.where(speed > 0, speed, guess))}
        if not curves:
            return None
        fallback = next(iter(curves.values()))
        return Profile(model, {ANY_TYPE: fallback, **curves})


def beliefs_for(
    knowledge: Knowledge,
    jobs: Sequence[Job],
    profiles: Sequence[Profile],
    cluster: Cluster,
    rng: np.random.Generator,
) -> Beliefs:
    """What the scheduler of a run is to believe."""
    if knowledge.kind == "wrong":
        return WrongBeliefs(jobs, profiles, knowledge.error, rng)
    if knowledge.kind == "learned":
        return LearnedBeliefs(jobs, profiles, cluster, knowledge.error, rng)
    return Beliefs(jobs, profiles)
