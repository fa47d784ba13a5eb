"""Synthetic traces with the statistics of Microsoft's Philly cluster.

Each quantity has its own random stream, so that another arrival process or user mix does not change sizes and
durations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, get_args

import numpy as np
import polars as pl
from scipy.special import ndtr, ndtri

from shoal.core.errors import ShoalError, did_you_mean
from shoal.core.profile import Profile
from shoal.sim.inputs.column_values import ITERATIONS, SUBMIT_S
from shoal.sim.inputs.model_pool import ModelPool, assign_models
from shoal.sim.inputs.table import FloatArray, IntArray

Arrivals = Literal["poisson", "diurnal", "bursty"]
ARRIVALS: tuple[str, ...] = get_args(Arrivals)

DAY_S = 86_400.0
HOUR_S = 3_600.0

#: Fraction of jobs by requested GPUs in the 82,247 jobs of the flat Philly trace, without sizes below 0.0005
#: (12, 24, 64, 128).
PHILLY_SIZES: Mapping[int, float] = MappingProxyType(
    {1: 0.93167, 2: 0.02210, 4: 0.02274, 8: 0.01998, 16: 0.00242, 32: 0.00081}
)

#: Jobs per hour of the day (UTC), and per day of the week from Monday, relative to the mean of the same trace.
PHILLY_HOURS = (
    1.27, 0.98, 1.12, 1.10, 0.70, 1.15, 1.67, 2.09, 1.11, 1.01, 1.02, 0.87,
    0.75, 0.70, 0.64, 0.65, 0.88, 0.67, 0.80, 0.73, 1.02, 0.92, 1.13, 1.01,
)  # fmt: skip
PHILLY_DAYS = (0.86, 1.07, 1.14, 1.29, 1.44, 0.61, 0.59)

#: Mean number of jobs in a burst of one user, and the mean gap between them. In Philly half of all jobs follow
#: the previous one within 8 s, and the number of jobs per hour has a coefficient of variation near 2.
BURST_JOBS = 20
BURST_GAP_S = 8.0

MOST_JOBS = 20_000_000

#: Valid loads. Below, no two jobs would overlap; above, all would arrive at once.
LOADS = (1e-6, 1e3)

#: The longest job of the trace ran for 53.6 days.
LONGEST_S = 5_000_000.0


@dataclass(frozen=True, slots=True)
class Durations:
    """A mixture of lognormals: weights, and mean and standard deviation of the logarithm of seconds."""

    weight: tuple[float, ...]
    mu: tuple[float, ...]
    sigma: tuple[float, ...]

    def draw(self, count: int, longest_s: float, rng: np.random.Generator) -> FloatArray:
        """Draw `count` durations from 1 s to `longest_s`: the mixture, truncated at `longest_s`."""
        part = rng.choice(len(self.weight), count, p=np.array(self.weight) / sum(self.weight))
        mu, sigma = np.array(self.mu)[part], np.array(self.sigma)[part]
        below = ndtr((np.log(longest_s) - mu) / sigma)
        drawn: FloatArray = np.exp(mu + sigma * ndtri(rng.random(count) * below))
        return np.maximum(drawn, 1.0)


#: Mixture by the smallest size for which it holds. Fitted to the durations of the flat Philly trace by expectation
#: maximisation on their logarithms (1,500 steps from equally spaced quantiles), with enough components to bring
#: the mean within 6 % and the distance between the distributions (Kolmogorov-Smirnov) to 0.04 or less.
#: Durations depend strongly on size: jobs of 8 GPUs or more are 2 % of all jobs and take 60 % of the GPU time.
PHILLY_DURATIONS: Mapping[int, Durations] = MappingProxyType(
    {
        1: Durations(
            (0.1752, 0.1435, 0.3997, 0.2816), (4.169, 5.091, 7.578, 7.914), (0.162, 0.975, 0.743, 2.157)
        ),
        2: Durations((0.6437, 0.1840, 0.1723), (2.894, 3.780, 11.396), (0.344, 1.453, 1.241)),
        3: Durations((0.2802, 0.5507, 0.1691), (5.331, 10.238, 11.673), (1.133, 1.667, 0.425)),
        5: Durations((0.3679, 0.1917, 0.4405), (6.396, 9.704, 12.111), (1.836, 0.735, 0.864)),
    }
)


@dataclass(frozen=True)
class Recipe:
    """What to generate. `load` = requested GPU-seconds / (gpus x time from the first to the last job)."""

    jobs: int = 1_000
    gpus: int = 64
    load: float = 0.9
    arrivals: Arrivals = "poisson"
    #: Names of users. The activity of a user is proportional to 1/rank.
    users: tuple[str, ...] = tuple(f"user{i}" for i in range(1, 21))
    sizes: Mapping[int, float] = field(default_factory=lambda: PHILLY_SIZES)
    longest_s: float = LONGEST_S
    #: The GPU type for which durations hold; None for that of `common_type`.
    gpu_type: str | None = None

    def __post_init__(self) -> None:
        if self.jobs < 1:
            raise ShoalError(f"jobs: a trace needs at least one, not {self.jobs}")
        if self.jobs > MOST_JOBS:
            raise ShoalError(f"jobs: {self.jobs:,} are more than fit in memory; give at most {MOST_JOBS:,}")
        if self.gpus < 1:
            raise ShoalError(f"gpus: a cluster needs at least one, not {self.gpus}")
        if not (LOADS[0] <= self.load <= LOADS[1]):
            raise ShoalError(
                f"load: give {LOADS[0]:g} to {LOADS[1]:g}, not {self.load:g}; 0.9 keeps the cluster busy"
            )
        if self.arrivals not in ARRIVALS:
            raise ShoalError(
                f"arrivals: there is no {self.arrivals!r}; {did_you_mean(self.arrivals, ARRIVALS)}"
            )
        if not self.users or len(set(self.users)) != len(self.users):
            raise ShoalError("users: give at least one name, and each name once")
        if not self.longest_s > 1:
            raise ShoalError(f"longest job: it must take more than 1 s, not {self.longest_s:g}")
        if not self.sizes or any(s < 1 or not 0 <= w < np.inf for s, w in self.sizes.items()):
            raise ShoalError("sizes: give at least 1 GPU and no negative shares, such as 1:0.9,8:0.1")
        if not any(self.sizes.values()):
            raise ShoalError("sizes: all shares are 0, so no job would have a size; give one above 0")


def generate(recipe: Recipe, profiles: Mapping[str, Profile], rng: np.random.Generator) -> pl.DataFrame:
    """A trace in the native format. The same recipe, profiles and seed give the same trace."""
    pool = ModelPool.of(profiles, recipe.gpu_type)
    for_sizes, for_durations, for_models, for_arrivals, for_users = rng.spawn(5)
    requested = _sizes(recipe, pool, for_sizes)
    duration_s = _durations(requested, recipe.longest_s, for_durations)
    model = assign_models(requested, pool, lambda below: for_models.integers(0, below))
    span_s = float(requested @ duration_s) / (recipe.gpus * recipe.load)
    if span_s > SUBMIT_S[1]:
        raise ShoalError(
            f"the last job would come after {span_s:.3g} s, and {SUBMIT_S[1]:g} is the most; "
            "give fewer jobs, more GPUs or a higher load"
        )
    submit_s, burst = _arrivals(recipe, span_s, for_arrivals)
    user = _users(recipe, burst, for_users)
    names = pl.Series(pool.models, dtype=pl.String)
    return pl.DataFrame(
        {
            "submit_s": np.floor(submit_s).astype(np.int64),
            "model": names.gather(model),
            "iterations": np.clip(duration_s * pool.speed(model, requested), 1.0, ITERATIONS[1]),
            "requested_gpus": requested,
            "max_gpus": pool.largest[model],
            "user": pl.Series(recipe.users, dtype=pl.String).gather(user),
        }
    )


def _sizes(recipe: Recipe, pool: ModelPool, rng: np.random.Generator) -> IntArray:
    """Requested GPUs, among the sizes that fit the cluster and at which some model runs."""
    sizes = np.array([s for s, share in recipe.sizes.items() if share > 0], np.int64)
    runs = [any(c.min_gpus <= s <= c.max_gpus for c in pool.curves) for s in sizes.tolist()]
    sizes = sizes[np.array(runs, np.bool_) & (sizes <= recipe.gpus)]
    if not len(sizes):
        raise ShoalError(
            f"sizes: no model runs at any of them on {recipe.gpus} GPUs; give other sizes or profiles"
        )
    share = np.array([recipe.sizes[int(s)] for s in sizes])
    return rng.choice(sizes, recipe.jobs, p=share / share.sum())


def _durations(requested: IntArray, longest_s: float, rng: np.random.Generator) -> FloatArray:
    starts = sorted(PHILLY_DURATIONS)
    group = np.searchsorted(starts, requested, side="right") - 1
    duration_s = np.empty(len(requested))
    for index, start in enumerate(starts):
        rows = np.flatnonzero(group == index)
        duration_s[rows] = PHILLY_DURATIONS[start].draw(len(rows), longest_s, rng)
    return duration_s


def _arrivals(recipe: Recipe, span_s: float, rng: np.random.Generator) -> tuple[FloatArray, IntArray]:
    """Times in order from 0 to `span_s`, and the burst of each job (without bursts, each job has its own)."""
    count = recipe.jobs
    if recipe.arrivals == "bursty":
        return _bursts(count, span_s, rng)
    # Given their number, the arrivals of a Poisson process are independent samples of its rate.
    at = np.sort(rng.random(count))
    submit_s = at * span_s if recipe.arrivals == "poisson" else _by_rate(at, span_s)
    return _stretched(submit_s, span_s), np.arange(count)


def _by_rate(at: FloatArray, span_s: float) -> FloatArray:
    """Quantiles `at` of an arrival rate that depends on the hour of the day and the day of the week."""
    hours = int(np.ceil(span_s / HOUR_S)) + 1
    hour = np.arange(hours)
    rate = np.array(PHILLY_HOURS)[hour % 24] * np.array(PHILLY_DAYS)[hour // 24 % 7]
    edges = np.minimum(np.arange(hours + 1) * HOUR_S, span_s)
    total = np.concatenate(([0.0], np.cumsum(rate * np.diff(edges))))
    return np.asarray(np.interp(at * total[-1], total, edges))


def _bursts(count: int, span_s: float, rng: np.random.Generator) -> tuple[FloatArray, IntArray]:
    """Bursts at random times, with a geometric number of jobs and exponential gaps."""
    length = rng.geometric(1.0 / BURST_JOBS, count)
    burst = np.repeat(np.arange(count), length)[:count]
    starts = rng.random(burst[-1] + 1) * span_s
    gaps = rng.exponential(BURST_GAP_S, count)
    elapsed = np.cumsum(gaps)
    first = np.searchsorted(burst, np.arange(burst[-1] + 1))
    submit_s = starts[burst] + elapsed - elapsed[first][burst]
    order = np.argsort(submit_s, kind="stable")
    return _stretched(submit_s[order], span_s), burst[order]


def _stretched(submit_s: FloatArray, span_s: float) -> FloatArray:
    """The times shifted and scaled to begin at 0 and end at `span_s`, so that the load is exact."""
    width = float(submit_s[-1] - submit_s[0])
    return np.asarray((submit_s - submit_s[0]) * (span_s / width if width > 0 else 0.0))


def _users(recipe: Recipe, burst: IntArray, rng: np.random.Generator) -> IntArray:
    """A user for each burst, by Zipf's law."""
    activity = 1.0 / np.arange(1, len(recipe.users) + 1)
    owner = rng.choice(len(recipe.users), int(burst.max()) + 1, p=activity / activity.sum())
    return owner[burst]
