"""What a trial is worth, in seconds of completion time, and what it costs.

A job has R seconds left at its speed s(a). At another size n it would end earlier by G(n) = R (1 - s(a) / s(n)).
s(n) is uncertain, so G has a mean and a standard deviation. If one job grows and another shrinks, their gains add up.
Once the speeds are measured, the change is made if its gain is above 0 and not made otherwise. So knowing is worth

    E[max(G, 0)] = σ (z Φ(z) + φ(z))        with z = μ / σ,

the expected improvement of Bayesian optimisation. It costs the pauses of the resizes and, if the expected gain is
below 0, the progress that the jobs lose during the trial.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import numpy as np
from scipy.special import ndtr

from shoal.core.arrays import FloatArray

#: A trial must be worth so many times its cost.
WORTH = 2.0


@dataclass(frozen=True, slots=True)
class Sampling:
    """How steps are measured."""

    #: Steps of one measurement, and the least time that it takes.
    steps: int = 4
    seconds: float = 0.0
    #: Measurements per trial: as many as fit into `trial_s`, and at most so many.
    most: int = 5
    trial_s: float = 4.0
    #: Seconds that a resize stops a job, and until its new workers are ready.
    pause_s: float = 1.0
    prepare_s: float = 5.0

    def samples(self, step_s: float) -> int:
        return min(max(ceil(self.trial_s / self._sample_s(step_s)), 1), self.most)

    def steps_of(self, samples: int, step_s: float) -> int:
        return max(samples * self.steps, ceil(samples * self.seconds / step_s))

    def trial_time_s(self, samples: int, step_s: float) -> float:
        return self.prepare_s + samples * self._sample_s(step_s)

    def expected_s(self, step_s: float) -> float:
        """How long a trial with steps of this length takes."""
        return self.trial_time_s(self.samples(step_s), step_s)

    def limit_s(self, samples: int, step_s: float) -> float:
        """When a trial is given up: new workers may start slowly, and steps may be slower than predicted."""
        return 60.0 + 4.0 * self.trial_time_s(samples, step_s)

    def _sample_s(self, step_s: float) -> float:
        return max(self.steps * step_s, self.seconds, 1e-9)


def gains_s(
    remaining_s: float, speed: FloatArray, relative_std: FloatArray, now_gpus: int
) -> tuple[FloatArray, FloatArray]:
    """Mean and standard deviation of the completion time that a job gains at each size."""
    ratio = speed[now_gpus] / np.maximum(speed, 1e-300)
    return remaining_s * (1.0 - ratio), remaining_s * ratio * relative_std


def expected_improvement(mean: FloatArray, std: FloatArray) -> FloatArray:
    """E[max(G, 0)] of normal G."""
    std = np.maximum(std, 1e-12)
    z = np.clip(mean / std, -30.0, 30.0)
    density = np.exp(-0.5 * z * z) / np.sqrt(2.0 * np.pi)
    return np.where(mean / std > 30.0, mean, std * (z * ndtr(z) + density))
