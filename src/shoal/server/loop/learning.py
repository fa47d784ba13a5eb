"""What is known of a live job's speed and length, and the source of each figure.

Before a job runs, its speed is that of earlier jobs with the same model word, or an assumption. While it runs,
its steps are measured. The remaining work comes, in order of preference, from the job's own count of steps,
from its loss curve and a target, from what its owner expects, or from an assumption. Each answer names its
source.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shoal.core.profile import ANY_TYPE, Profile, SpeedCurve
from shoal.knowledge.online_speed import Source
from shoal.knowledge.remaining import ConvergenceEstimator, LossAtMost
from shoal.knowledge.speed_estimator import SpeedEstimator
from shoal.knowledge.unknown import Unknown
from shoal.server.api.models import Estimate
from shoal.wire.messages import Report

ASSUMED_LENGTH_S = 3600.0
ASSUMED_SERIAL = 0.1
"""Part of a step that more GPUs do not make shorter, for a job of which nothing is known (Amdahl's law)."""
ENOUGH_STEPS = 4
Floats = np.ndarray[Any, np.dtype[np.float64]]
LEVEL = 1e-6
"""A relative difference of two speeds that is negligible but not zero."""
SIGNIFICANT = 0.15
"""Relative change of a speed that leads to a new profile and a new decision."""


@dataclass(slots=True)
class Length:
    """Steps left, at least and at most, and where that comes from."""

    steps: float
    low: float
    high: float
    basis: str
    assumed: bool = False


@dataclass(slots=True)
class Pace:
    """Seconds per step of one generation, from reports that come at their own times.

    A report may be made in the middle of a step, or tell of steps of the generation before. So only reports
    that lie within the generation count, and of those the time spent in steps that were completed.
    """

    first_step: int = 0
    steps: int = 0
    busy_s: float = 0.0

    def begin(self, step: int) -> None:
        """A new generation works from this step on."""
        self.first_step, self.steps, self.busy_s = step, 0, 0.0

    def take(self, report: Report) -> float | None:
        """Seconds per step, once there are enough of them; then it begins anew."""
        if report.step - report.steps < self.first_step or report.pause_s is not None:
            return None
        self.steps += report.steps
        self.busy_s += report.compute_s + report.sync_s + report.input_s
        if self.steps < ENOUGH_STEPS or self.busy_s <= 0:
            return None
        step_s = self.busy_s / self.steps
        self.steps, self.busy_s = 0, 0.0
        return step_s


@dataclass(slots=True)
class Learner:
    """Of one job. `speed` is shared by all jobs of the same model word."""

    speed: SpeedEstimator
    min_gpus: int
    max_gpus: int
    iterations: float | None
    expected_s: float | None
    requested_gpus: int
    target_loss: float | None
    #: Placements over up to this many nodes have speeds of their own.
    nodes: int = 1
    #: From jobs before it: seconds that such a job took at the requested size.
    convergence: ConvergenceEstimator = field(default_factory=ConvergenceEstimator)
    pace: Pace = field(default_factory=Pace)
    step: float = 0.0
    total_steps: float | None = None
    profile: Profile | None = None
    #: The speed the profile has for the share that was measured last.
    believed: dict[tuple[str, int], float] = field(default_factory=dict)

    def observe(self, gpus: int, nodes: int, gpu_type: str, step_s: float) -> bool:
        """A measured step. True if decisions should be made anew because of it."""
        if isinstance(self.speed.observe(gpus, nodes, gpu_type, step_s), Unknown):
            return False
        measured = self.speed.seconds(gpus, nodes, gpu_type)
        if isinstance(measured, Unknown):
            return False
        before = self.believed.get((gpu_type, gpus))
        if before is not None and abs(measured / before - 1.0) < SIGNIFICANT:
            return False
        self.believed[gpu_type, gpus] = measured
        return True

    def make_profile(self, model: str) -> Profile:
        """Speed by share for each GPU type that was measured, else an assumption for all."""
        curves: dict[str, dict[int, SpeedCurve]] = {}
        for gpu_type in self.speed.gpu_types():
            table = self.speed.table(gpu_type)
            if not isinstance(table, Unknown):
                speed = np.nan_to_num(table.iterations_per_s[: self.max_gpus + 1], nan=0.0)
                if len(speed) > self.max_gpus and (speed[1:] > 0).all():
                    curves[gpu_type] = {0: SpeedCurve(plain_speed(speed, self.min_gpus))} | self._spread(
                        gpu_type
                    )
        if not curves:
            curves[ANY_TYPE] = {0: SpeedCurve(assumed_speed(self.max_gpus))}
        elif ANY_TYPE not in curves:
            # A type not measured yet is taken to be like the one that was: it must be possible to try it.
            curves[ANY_TYPE] = next(iter(curves.values()))
        self.profile = Profile(model, curves)
        return self.profile

    def _spread(self, gpu_type: str) -> dict[int, SpeedCurve]:
        """By how many nodes it spans, where there are several: what a placement that moves jobs goes by."""
        nodes = range(1, self.nodes + 1) if self.nodes > 1 else ()
        return {n: SpeedCurve(self.speed.spread(gpu_type, n)[: self.max_gpus + 1]) for n in nodes}

    def basis(self) -> str:
        measured = self.speed.gpu_types()
        if not measured:
            return "nothing was measured yet: each GPU is assumed to add a little less than the one before"
        return f"measured on {', '.join(measured)}, by this job and earlier ones of its model"

    def points(self, gpu_type: str) -> list[tuple[int, float, bool]]:
        """(GPUs, steps per second, whether measured)."""
        table = self.speed.table(gpu_type)
        if isinstance(table, Unknown):
            return [(n, float(s), False) for n, s in enumerate(assumed_speed(self.max_gpus)) if n]
        return [
            (n, float(table.iterations_per_s[n]), bool(table.source[n] == Source.MEASURED))
            for n in range(1, min(self.max_gpus, len(table.iterations_per_s) - 1) + 1)
            if math.isfinite(table.iterations_per_s[n])
        ]

    def length(self, speed_at_requested: float) -> Length:
        """Steps left. Never unknown, because policies must decide; but it says when it is an assumption."""
        if self.total_steps:
            left = max(self.total_steps - self.step, 0.0)
            return Length(left, left, left, "the job's own count of steps")
        if self.iterations is not None:
            left = max(self.iterations - self.step, 0.0)
            return Length(left, left, left, "the number of steps its owner gave")
        if self.target_loss is not None:
            found = self.convergence.remaining(LossAtMost(self.target_loss))
            if not isinstance(found, Unknown):
                return Length(found.steps, found.low_steps, found.high_steps, "its loss curve")
        if self.expected_s is not None:
            left = max(self.expected_s * speed_at_requested - self.step, 0.0)
            return Length(left, 0.5 * left, 2.0 * left, "what its owner expects")
        left = max(
            ASSUMED_LENGTH_S * speed_at_requested - self.step, 0.1 * ASSUMED_LENGTH_S * speed_at_requested
        )
        return Length(left, 0.0, math.inf, "an assumption: nothing is known of its length", assumed=True)

    def remaining(self, speed: float, speed_at_requested: float) -> Estimate:
        """Time left at this speed."""
        length = self.length(speed_at_requested)
        if length.assumed:
            return Estimate(unknown="nothing is known of its length: give `iterations` or `expected_s`")
        if not speed > 0:
            return Estimate(unknown="its speed is not known yet")
        return Estimate(low_s=length.low / speed, high_s=length.high / speed, basis=length.basis)


def plain_speed(speed: Floats, min_gpus: int) -> Floats:
    """The curve that decisions are made with: a larger share counts as slower only if it plainly is.

    Measurements are noisy: a share that is slower than a smaller one by less than `SIGNIFICANT` counts as equally
    fast. No share below the job's minimum, which it can never have, counts as faster.
    """
    made = speed.copy()
    made[:min_gpus] = np.minimum(made[:min_gpus], (1.0 - LEVEL) * made[min_gpus])
    best = made[0]
    for gpus in range(1, len(made)):
        if (1.0 - SIGNIFICANT) * best < made[gpus] <= best:
            made[gpus] = best * (1.0 + LEVEL)
        best = max(best, made[gpus])
    return made


def assumed_speed(max_gpus: int) -> Floats:
    """Steps per second for 0..max GPUs, one step per second with one GPU."""
    gpus = np.arange(1, max_gpus + 1)
    return np.concatenate([[0.0], 1.0 / (ASSUMED_SERIAL + (1.0 - ASSUMED_SERIAL) / gpus)])


def fixed_profile(model: str, gpus: int) -> Profile:
    """Of a job with a fixed size: one second of it is one step."""
    speed = np.zeros(gpus + 1)
    speed[gpus] = 1.0
    return Profile(model, {ANY_TYPE: {0: SpeedCurve(speed)}})
