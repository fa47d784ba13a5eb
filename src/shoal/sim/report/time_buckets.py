"""Downsampling of quantities over time: the mean, smallest and largest value in each time bucket.

Buckets begin at 0, and their width in seconds is a power of two. Runs of different length, stored with different
widths, can therefore be brought to the largest width without loss: buckets merge in pairs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]

MAX_BUCKETS = 512


@dataclass(frozen=True, slots=True)
class Steps:
    """A step function: each value holds until the next time, the last one until `end_s`."""

    time_s: FloatArray
    value: FloatArray
    end_s: float

    @classmethod
    def of(cls, time_s: Any, value: Any, end_s: float) -> Steps:
        """From entries in order of time; the last one counts if several have the same time."""
        times, values = np.asarray(time_s, np.float64), np.asarray(value, np.float64)
        last = np.append(times[1:] > times[:-1], True) if len(times) else np.zeros(0, bool)
        return cls(times[last], values[last], max(end_s, float(times[-1]) if len(times) else 0.0))


@dataclass(frozen=True, slots=True)
class Buckets:
    """Per bucket: the mean over the covered time, and the extremes."""

    width_s: float
    end_s: float
    mean: FloatArray
    low: FloatArray
    high: FloatArray

    @property
    def covered_s(self) -> FloatArray:
        """Seconds of each bucket before the end of the run."""
        starts = np.arange(len(self.mean)) * self.width_s
        return np.clip(self.end_s - starts, 0.0, self.width_s)


def width_for(end_s: float, most: int = MAX_BUCKETS) -> float:
    """The smallest power of two (seconds) that covers 0 .. `end_s` with at most this many buckets."""
    if end_s <= 0:
        return 1.0
    width = 2.0 ** math.ceil(math.log2(end_s / most))
    return width if math.ceil(end_s / width) <= most else 2 * width


def bucket(steps: Steps, width_s: float) -> Buckets:
    """Mean, smallest and largest value of a step function in each bucket."""
    count = max(math.ceil(steps.end_s / width_s), 1)
    if not len(steps.time_s):
        zero = np.zeros(count)
        return Buckets(width_s, steps.end_s, zero, zero, zero)
    edges = np.minimum(np.arange(count + 1) * width_s, steps.end_s)
    # The integral is piecewise linear between the entries, so interpolation at the edges is exact.
    knots = np.append(steps.time_s, max(steps.end_s, steps.time_s[-1]))
    integral = np.concatenate(([0.0], np.cumsum(steps.value * np.diff(knots))))
    area = np.diff(np.interp(edges, knots, integral))
    covered = np.diff(edges)
    # Before the first entry the value is 0. A bucket contains its initial value and the changes inside it.
    at_start = np.searchsorted(steps.time_s, edges[:-1], side="right") - 1
    carried = np.where(at_start >= 0, steps.value[np.maximum(at_start, 0)], 0.0)
    low, high = carried.copy(), carried.copy()
    where = np.minimum((steps.time_s / width_s).astype(np.int64), count - 1)
    lasts = np.append(steps.time_s[1:], steps.end_s) > steps.time_s  # ignore values without duration
    np.minimum.at(low, where[lasts], steps.value[lasts])
    np.maximum.at(high, where[lasts], steps.value[lasts])
    mean = np.where(covered > 0, area / np.where(covered > 0, covered, 1.0), carried)
    return Buckets(width_s, steps.end_s, mean, low, high)


def count_in(time_s: Any, end_s: float, width_s: float) -> NDArray[np.int64]:
    """The number of times in each bucket."""
    count = max(math.ceil(end_s / width_s), 1)
    where = np.minimum((np.asarray(time_s, np.float64) / width_s).astype(np.int64), count - 1)
    return np.bincount(where, minlength=count)


def coarsen(buckets: Buckets, width_s: float) -> Buckets:
    """Merge into wider buckets; `width_s` is their width times a power of two."""
    factor = round(width_s / buckets.width_s)
    if factor <= 1:
        return buckets
    weight = buckets.covered_s
    area, covered = fold(buckets.mean * weight, factor), fold(weight, factor)
    starts = np.arange(0, len(buckets.mean), factor)
    return Buckets(
        width_s,
        buckets.end_s,
        np.where(covered > 0, area / np.where(covered > 0, covered, 1.0), buckets.mean[starts]),
        np.minimum.reduceat(buckets.low, starts),
        np.maximum.reduceat(buckets.high, starts),
    )


def fold(values: Any, factor: int) -> NDArray[Any]:
    """Sums of `factor` neighbours."""
    array = np.asarray(values)
    return np.add.reduceat(array, np.arange(0, len(array), factor)) if factor > 1 else array
