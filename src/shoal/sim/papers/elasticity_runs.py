"""Runs of one job with an autoscaler, or at a fixed size, for the experiments of `elasticity`.

Seconds per step of k workers, each with b samples, on nodes of four GPUs:

    θ0 b + θ1 + θ2 (k-1)/k + θ3 [k > 4] (k-1)/k + θ4 (k-1)

with coefficients fitted to Pollux' public measurements of the two models, placements and scalability up to 64 GPUs
(1512 and 1152 steps; non-negative least squares of relative errors, which are 11 and 9 % on average; see
`knowledge.speed_models`). The batch per worker is fixed until the global batch reaches its limit, as in the paper.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from shoal.knowledge.autoscaler import Autoscaler, Options
from shoal.knowledge.heuristics import Heuristic, Progress

#: After so many steps without a resize, the rest of a run is computed in one go.
SETTLED_STEPS = 300
NOISE = 0.05


@dataclass(frozen=True, slots=True)
class Training:
    """A model and its training: coefficients, limits of the batch, sizes, and the paper's idle seconds of a resize."""

    name: str
    theta: tuple[float, float, float, float, float]
    local_batch: int
    global_batch: int
    #: Samples of the whole training.
    samples: float
    max_workers: int
    grow_idle_s: float
    shrink_idle_s: float

    @property
    def sizes(self) -> tuple[int, ...]:
        """The authors add and remove four workers at a time."""
        return tuple(range(4, self.max_workers + 1, 4))

    def batch(self, workers: int) -> int:
        return min(self.local_batch * workers, self.global_batch)

    def step_s(self, workers: int) -> float:
        ring = (workers - 1) / workers
        local = self.batch(workers) / workers
        terms = (local, 1.0, ring, ring * (workers > 4), workers - 1.0)
        return float(np.dot(self.theta, terms))

    def throughput(self, workers: int) -> float:
        return self.batch(workers) / self.step_s(workers)


#: Limits of the batch and idle seconds are the paper's. We chose the lengths: those of CIFAR-10 such that the time to
#: find the size is about the part of the whole that it reports, those of ImageNet as 90 epochs.
CIFAR = Training("CIFAR-10", (5.7e-4, 0.0277, 0.0069, 0.0708, 0.0017), 256, 1024, 6.5e6, 60, 3.179, 2.612)
IMAGENET = Training("ImageNet", (3.28e-3, 0.1115, 0.0, 0.1384, 0.0044), 128, 8192, 1.15e8, 64, 6.813, 4.376)


@dataclass(frozen=True, slots=True)
class Run:
    """What a run took. `found_s`: when the last resize was done."""

    seconds: float
    gpu_s: float
    found_s: float
    resizes: int
    workers: int


@lru_cache(1024)
def static(training: Training, workers: int) -> Run:
    seconds = training.samples / training.throughput(workers)
    return Run(seconds, workers * seconds, 0.0, 0, workers)


def autoscaled(
    training: Training, start: int, heuristic: Heuristic, options: Options, rng: np.random.Generator
) -> Run:
    """A run that begins with `start` workers."""
    sizes = training.sizes
    fitting = replace(options, sizes=sizes, min_gpus=sizes[0], max_gpus=sizes[-1])
    engine = Autoscaler(start, fitting, heuristic)
    workers, now_s, gpu_s, found_s, resizes, same = start, 0.0, 0.0, 0.0, 0, 0
    left = training.samples
    while left > 0 and same < SETTLED_STEPS:
        step_s = training.step_s(workers) * float(np.exp(rng.normal(0.0, NOISE)))
        now_s, gpu_s, left = now_s + step_s, gpu_s + workers * step_s, left - training.batch(workers)
        engine.observe(workers, step_s, float(training.batch(workers)))
        aim = engine.decide(Progress(now_s, max(left, 1.0))).gpus
        same += 1
        if aim != workers:
            idle_s = training.grow_idle_s if aim > workers else training.shrink_idle_s
            now_s, gpu_s = now_s + idle_s, gpu_s + max(workers, aim) * idle_s
            workers, found_s, resizes, same = aim, now_s, resizes + 1, 0
    rest_s = max(left, 0.0) / training.throughput(workers)
    return Run(now_s + rest_s, gpu_s + workers * rest_s, found_s, resizes, workers)


# -- a straggler ---------------------------------------------------------------------------------------

#: The authors' rule: the moving average (weight of the newest step) of a worker's speed over the median, and its limit.
NEWEST, LIMIT = 0.1, 0.8


def steps_to_find(slowdown: float) -> int | None:
    """Steps until the authors' rule names a worker that became slower; None if it never does."""
    speed, average = 1.0 / slowdown, 1.0
    if speed >= LIMIT:
        return None
    steps = 0
    while average >= LIMIT:
        average += NEWEST * (speed - average)
        steps += 1
    return steps


def with_straggler(training: Training, workers: int, slowdown: float, *, replaces: bool) -> float:
    """Seconds of a run in which one worker becomes slower at once: all wait for it, until it is replaced."""
    compute_s = training.theta[0] * training.batch(workers) / workers
    slow_s = training.step_s(workers) + (slowdown - 1.0) * compute_s
    steps = training.samples / training.batch(workers)
    found = steps_to_find(slowdown)
    if not replaces or found is None:
        return steps * slow_s
    found = max(found, 10)  # it decides every ten steps
    idle_s = training.grow_idle_s
    return found * slow_s + idle_s + (steps - found) * training.step_s(workers)
