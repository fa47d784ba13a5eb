"""The scheduler's knowledge of the jobs' speed, which may differ from the true profiles of the simulation.

true: the true profiles. wrong: speeds and remaining work are off by a given error, drawn once per job and share.
learned: nothing is known at first. After a job has trained for some time at a share, its step time is measured
with noise, and a speed model is fitted to the measurements of all jobs of the same model (`learned_profiles`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from shoal.core.arrays import FloatArray
from shoal.core.cluster import Cluster
from shoal.core.errors import ShoalError
from shoal.core.job import Job
from shoal.core.profile import Profile, SpeedCurve
from shoal.core.words import counted
from shoal.sim.costs import Costs

if TYPE_CHECKING:
    from shoal.scheduler.exploration.exploration import Exploration

#: The part of the GPU time in which jobs are measured at other sizes, with learned profiles.
EXPLORED = 0.02


@dataclass(frozen=True)
class Knowledge:
    """How much the scheduler knows: `true`, `wrong:0.3` (error), `learned:0.05` (noise of a measurement).

    `learned:0.05:0.02` also gives the part of the GPU time in which jobs may be measured at other sizes.
    """

    kind: str = "true"
    error: float = 0.0
    explore: float = 0.0

    @classmethod
    def parse(cls, word: str) -> Knowledge:
        kind, *numbers = word.split(":")
        default = {"true": [], "wrong": [0.3], "learned": [0.05, EXPLORED]}
        if kind not in default:
            raise ShoalError(f"--knowledge {word}: use true, wrong:ERROR or learned:NOISE:EXPLORED")
        if len(numbers) > len(default[kind]):
            raise ShoalError(
                f"--knowledge {word}: {kind} takes {counted(len(default[kind]), 'number')} at most"
            )
        given = list(default[kind])
        for i, number in enumerate(numbers):
            try:
                given[i] = float(number) if number else given[i]
            except ValueError:
                raise ShoalError(f"--knowledge {word}: {number!r} is not a number") from None
        error, explore = [*given, 0.0, 0.0][:2]
        if not 0 <= error < 10:
            raise ShoalError(f"--knowledge {word}: the error must be from 0 to 10")
        if not 0 <= explore <= 1:
            raise ShoalError(f"--knowledge {word}: the part of the GPU time must be from 0 to 1")
        return cls(kind, error, explore)

    def __str__(self) -> str:
        if self.kind == "true":
            return self.kind
        usual = self.kind == "wrong" or self.explore == EXPLORED
        return f"{self.kind}:{self.error:g}" + ("" if usual else f":{self.explore:g}")


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

    def measure(self, j: int, gpus: int, nodes: int, gpu_type: str, rate: float, servers: int = 0) -> bool:
        """Measure a job that has trained for some time. True if the profiles of its model have changed."""
        return False


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


def exploration_for(knowledge: Knowledge, costs: Costs) -> Exploration | None:
    """What measures jobs at other sizes in a run, if profiles are learned."""
    if knowledge.kind != "learned" or not knowledge.explore:
        return None
    from shoal.scheduler.exploration.budget import Budget
    from shoal.scheduler.exploration.exploration import Exploration
    from shoal.scheduler.exploration.worth import Sampling
    from shoal.sim.learned_profiles import LearnedProfiles

    sample_s = LearnedProfiles.measure_after_s
    sampling = Sampling(1, sample_s, 1, sample_s, pause_s=costs.move_s, prepare_s=costs.prepare_s)
    return Exploration(Budget(knowledge.explore), sampling)


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
