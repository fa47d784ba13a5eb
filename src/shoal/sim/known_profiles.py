"""The scheduler's knowledge of the jobs' speed, which may differ from the true profiles of the simulation.

true: the true profiles. wrong: speeds and remaining work are off by a given error, drawn once per job and share.
learned: nothing is known at first. After a job has trained for some time at a share, its step time is measured
with noise, and a speed model is fitted to the measurements of all jobs of the same model (`learned_profiles`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shoal.core.arrays import FloatArray
from shoal.core.cluster import Cluster
from shoal.core.errors import ShoalError
from shoal.core.job import Job
from shoal.core.profile import Profile, SpeedCurve


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
            raise ShoalError(f"--knowledge {word}: use true, wrong:ERROR or learned:NOISE")
        try:
            error = float(number) if number else default[kind]
        except ValueError:
            raise ShoalError(f"--knowledge {word}: {number!r} is not a number") from None
        if not 0 <= error < 10 or (kind == "true" and number):
            raise ShoalError(f"--knowledge {word}: the error must be from 0 to 10, and true has none")
        return cls(kind, error)

    def __str__(self) -> str:
        return self.kind if self.kind == "true" else f"{self.kind}:{self.error:g}"


class KnownProfiles:
    """True knowledge: the scheduler knows every profile and the remaining work."""

    #: Seconds that a job trains at a share before it is measured; None: no measurements.
    measure_after_s: float | None = None

    def __init__(self, jobs: Sequence[Job], profiles: Sequence[Profile]) -> None:
        self.jobs = jobs
        self.profiles = profiles

    def profile(self, j: int) -> Profile:
        """The profile that the scheduler gets when a job arrives."""
        return self.profiles[j]

    def remaining(self, j: int, left: float) -> float:
        """The remaining work as the scheduler knows it, given the true value."""
        return left

    def measure(
        self, j: int, gpus: int, nodes: int, gpu_type: str, rate: float, servers: int = 0
    ) -> Profile | None:
        """Measure a job that has trained for some time: its new profile, or None if nothing was learned."""
        return None


class WrongProfiles(KnownProfiles):
    """Speeds and lengths with a log-normal error: about two in three factors are within the given error."""

    def __init__(
        self, jobs: Sequence[Job], profiles: Sequence[Profile], error: float, rng: np.random.Generator
    ) -> None:
        super().__init__(jobs, profiles)
        sigma = np.log1p(error)
        self._length = np.exp(rng.normal(0.0, sigma, len(jobs)))
        seeds = rng.integers(1 << 63, size=len(jobs))
        self._distorted = [self._distort(p, sigma, int(s)) for p, s in zip(profiles, seeds)]

    @staticmethod
    def _distort(profile: Profile, sigma: float, seed: int) -> Profile:
        rng = np.random.default_rng(seed)
        curves = {}
        for gpu_type, by_nodes in profile.curves.items():
            shares = len(by_nodes[0].speed)
            # Errors at neighbouring shares are correlated, as those of a fitted curve: a random slope.
            n = np.maximum(np.arange(shares), 1)
            tilt = rng.normal(0.0, sigma) * np.log(n) / max(np.log(shares), 1.0)
            off = np.exp(tilt + rng.normal(0.0, sigma))
            # The slowdown on more nodes has an error too.
            node_off = np.exp(rng.normal(0.0, sigma)) if len(by_nodes) > 1 else 1.0
            curves[gpu_type] = {
                nodes: SpeedCurve(
                    _slower(c.speed * off[: len(c.speed)], by_nodes[0].speed, c.speed, node_off)
                )
                for nodes, c in by_nodes.items()
            }
        if profile.by_servers is None:
            return Profile(profile.model, curves)
        ps, workers = (1.0 + np.arange(n) for n in profile.by_servers.shape)
        off_ps, off_workers = rng.normal(0.0, sigma, 2) / np.log(2 + np.array([len(ps), len(workers)]))
        factor = np.exp(rng.normal(0.0, sigma)) * np.outer(ps**off_ps, workers**off_workers)
        return Profile.of_servers(profile.model, profile.by_servers * factor)

    def profile(self, j: int) -> Profile:
        return self._distorted[j]

    def remaining(self, j: int, left: float) -> float:
        return left * float(self._length[j])


def _slower(estimate: FloatArray, packed: FloatArray, spread: FloatArray, off: float) -> FloatArray:
    """The estimated curve on several nodes: its slowdown against the packed one has an error too."""
    packed = packed[: len(spread)]
    loss = np.divide(spread, packed, out=np.ones_like(spread), where=(packed > 0) & (spread > 0))
    return np.asarray(estimate * loss ** (off - 1.0))


def known_profiles_for(
    knowledge: Knowledge,
    jobs: Sequence[Job],
    profiles: Sequence[Profile],
    cluster: Cluster,
    rng: np.random.Generator,
) -> KnownProfiles:
    """The scheduler's knowledge in a run."""
    if knowledge.kind == "wrong":
        return WrongProfiles(jobs, profiles, knowledge.error, rng)
    if knowledge.kind == "learned":
        from shoal.sim.learned_profiles import LearnedProfiles

        return LearnedProfiles(jobs, profiles, cluster, knowledge.error, rng)
    return KnownProfiles(jobs, profiles)
