"""What is assumed of a job's speed before it is measured: Amdahl's law with a serial part of one tenth.

    seconds per step with n GPUs = c (0.1 + 0.9 / n)

With 2, 3, 4 and 8 GPUs a job is then 1.8, 2.5, 3.1 and 4.7 times as fast as with one. `speed_fit` combines this
curve with measurements. Measured at one size only, the curve is this one, scaled to the measurement.
"""

from __future__ import annotations

import numpy as np

from shoal.knowledge.speed_models import Floats

ASSUMED_SERIAL = 0.1
"""Part of a step that more GPUs do not make shorter."""
WITHIN = 1.645
"""Standard deviations on either side of an estimate that give a 90 % interval."""


def assumed_speed(max_gpus: int) -> Floats:
    """Steps per second for 0..max GPUs, one step per second with one GPU."""
    gpus = np.arange(1, max_gpus + 1)
    return np.concatenate([[0.0], 1.0 / (ASSUMED_SERIAL + (1.0 - ASSUMED_SERIAL) / gpus)])


def all_reduce_prior(samples_of_one_gpu: float) -> Floats:
    """The same curve as coefficients of `speed_models.ALL_REDUCE`, up to their scale."""
    return np.array([(1.0 - ASSUMED_SERIAL) / samples_of_one_gpu, ASSUMED_SERIAL, 0.0, 0.0, 0.0])
