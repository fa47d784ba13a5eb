"""What is known of a live job's speed and length, and the source of each figure.

Before a job runs, its speed is that of earlier jobs with the same model word, or an assumption. While it runs,
its steps are measured. The remaining work comes, in order of preference, from the job's own count of steps,
from its loss curve and a target, from what its owner expects, or from an assumption. Each answer names its
source.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from shoal.core.profile import ANY_TYPE, Profile, SpeedCurve
from shoal.knowledge.online_speed import Source
from shoal.knowledge.plain_speed import SIGNIFICANT, plain_speed
from shoal.knowledge.remaining import ConvergenceEstimator, LossAtMost
from shoal.knowledge.speed_estimator import SpeedEstimator
from shoal.knowledge.speed_prior import assumed_speed
from shoal.knowledge.unknown import Unknown
from shoal.server.api.models import Estimate, SpeedPoint
from shoal.wire.messages import Report

ASSUMED_LENGTH_S = 3600.0
#: Reports whose median is compared with a job's target loss.
RECENT_LOSSES = 5
ENOUGH_STEPS = 4
ENOUGH_SAMPLES = 5
"""After so many measurements at one size, further ones count only if they differ."""


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
    #: Whether it can be resized while it trains, so that measuring it at other sizes costs little.
    is_live: bool = True
    #: From jobs before it: seconds that such a job took at the requested size.
    convergence: ConvergenceEstimator = field(default_factory=ConvergenceEstimator)
    #: The losses that were reported last.
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_LOSSES))
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
        if self.speed.samples(gpus, gpu_type) <= ENOUGH_SAMPLES:
            before = None
        if before is not None and abs(measured / before - 1.0) < SIGNIFICANT:
            return False
        self.believed[gpu_type, gpus] = measured
        return True

    def observe_loss(self, step: float, loss: float) -> None:
        self.convergence.observe(step, loss)
        self.losses.append(loss)

    def recent_loss(self) -> float | None:
        """The median of the last reported losses, so that one lucky batch does not count; None: too few reports."""
        return median(self.losses) if len(self.losses) == RECENT_LOSSES else None

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
        uncertain = {t: u for t in curves if not isinstance(u := self.speed.uncertainty(t), Unknown)}
        self.profile = Profile(model, curves, uncertain=uncertain if self.is_live else {})
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

    def points(self, gpu_type: str) -> list[SpeedPoint]:
        """The speed by number of GPUs: measured or fitted, with its interval."""
        table = self.speed.table(gpu_type)
        if isinstance(table, Unknown):
            assumed = enumerate(assumed_speed(self.max_gpus).tolist())
            return [SpeedPoint(gpus=n, speed=speed, measured=False) for n, speed in assumed if n]
        (low, high), fitted = table.interval(), self.speed.fitted(gpu_type)
        return [
            SpeedPoint(
                gpus=n,
                speed=float(table.iterations_per_s[n]),
                measured=bool(table.source[n] == Source.MEASURED),
                low_speed=float(low[n]),
                high_speed=float(high[n]) if math.isfinite(high[n]) else None,
                fitted_speed=None if isinstance(fitted, Unknown) else float(fitted[n]),
            )
            for n in range(1, min(self.max_gpus, len(table.iterations_per_s) - 1) + 1)
            if math.isfinite(table.iterations_per_s[n])
        ]

    def is_measured(self, gpus: int, gpu_type: str) -> bool:
        return self.speed.samples(gpus, gpu_type) > 0

    def length(self, speed_at_requested: float) -> Length:
        """Steps left. Never unknown, because policies must decide; but it says when it is an assumption.

        A job with a target for its loss ends at the target or with its last step, whichever comes first.
        """
        counted, curve = self._counted(), self._until_target()
        if counted is not None and curve is not None and curve.steps < counted.steps:
            high = min(curve.high, counted.steps)
            return Length(curve.steps, curve.low, high, f"{curve.basis}, before its last step")
        if counted is not None:
            return counted
        if curve is not None:
            return curve
        if self.expected_s is not None:
            left = max(self.expected_s * speed_at_requested - self.step, 0.0)
            return Length(left, 0.5 * left, 2.0 * left, "what its owner expects")
        left = max(
            ASSUMED_LENGTH_S * speed_at_requested - self.step, 0.1 * ASSUMED_LENGTH_S * speed_at_requested
        )
        return Length(left, 0.0, math.inf, "an assumption: nothing is known of its length", assumed=True)

    def _counted(self) -> Length | None:
        """Steps until the last one, if their number is known."""
        total = self.total_steps or self.iterations
        if total is None:
            return None
        left = max(total - self.step, 0.0)
        basis = "the job's own count of steps" if self.total_steps else "the number of steps its owner gave"
        return Length(left, left, left, basis)

    def _until_target(self) -> Length | None:
        """Steps until the loss reaches its target, if the curve tells."""
        if self.target_loss is None:
            return None
        found = self.convergence.remaining(LossAtMost(self.target_loss))
        if isinstance(found, Unknown):
            return None
        return Length(found.steps, found.low_steps, found.high_steps, "its loss curve")

    def remaining(self, speed: float, speed_at_requested: float) -> Estimate:
        """Time left at this speed."""
        length = self.length(speed_at_requested)
        if length.assumed:
            return Estimate(unknown="nothing is known of its length: give `iterations` or `expected_s`")
        if not speed > 0:
            return Estimate(unknown="its speed is not known yet")
        return Estimate(low_s=length.low / speed, high_s=length.high / speed, basis=length.basis)


def fixed_profile(model: str, gpus: int) -> Profile:
    """Of a job with a fixed size: one second of it is one step."""
    speed = np.zeros(gpus + 1)
    speed[gpus] = 1.0
    return Profile(model, {ANY_TYPE: {0: SpeedCurve(speed)}})
