"""Tiresias with the Gittins index: the distribution of service times is known, not that of each job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from shoal.core.arrays import FloatArray, IntArray
from shoal.core.compiled import kernel
from shoal.core.errors import ShoalError
from shoal.core.view import View
from shoal.policies.tiresias import TiresiasL, TiresiasOptions


@kernel
def gittins_table(service: FloatArray) -> FloatArray:
    """Gittins index of a job that has attained 0, s_1, s_2, ..., for sorted samples s of the service.

    G(a) = sup_d P(S - a <= d | S > a) / E[min(S - a, d) | S > a]. Over samples, the supremum is attained at
    some d = s_j - a. A job beyond the largest sample has index 0.
    """
    k = len(service)
    total = np.concatenate((np.zeros(1), np.cumsum(service)))
    index = np.zeros(k + 1)
    for i in range(k):  # the job has attained more than the first i samples
        a = service[i - 1] if i > 0 else 0.0
        for j in range(i + 1, k + 1):
            done = j - i
            spent = total[j] - total[i] - done * a + (k - j) * (service[j - 1] - a)
            if spent > 0:
                index[i] = max(index[i], done / spent)
    return index


def _default_service() -> tuple[float, ...]:
    """A heavy-tailed default: quantiles of a log-normal with median 15 GPU-minutes and sigma 2."""
    from scipy.special import ndtri

    quantiles = (np.arange(200) + 0.5) / 200
    return tuple(np.exp(np.log(900.0) + 2.0 * ndtri(quantiles)).round(1))


@dataclass(frozen=True)
class TiresiasGOptions(TiresiasOptions):
    policy: ClassVar[str] = "tiresias-g"
    service: str = "attained"
    thresholds_gpu_s: tuple[float, ...] = (3_600.0, 36_000.0)
    #: Samples of the jobs' total service in GPU-seconds; empty: a log-normal with median 15 GPU-minutes.
    distribution_gpu_s: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        TiresiasOptions.__post_init__(self)
        if any(not (s > 0 and np.isfinite(s)) for s in self.distribution_gpu_s):
            raise ShoalError(
                f"option distribution_gpu_s of policy {self.policy!r} must hold positive numbers of GPU-seconds"
            )


class TiresiasG(TiresiasL):
    """Two-dimensional Gittins index (Gu et al., NSDI'19): lengths unknown, their distribution known.

    Like Tiresias-L, but inside a queue the job with the largest Gittins index goes first. With S the total
    service of a job and a the service it has attained,

        G(a) = sup_d P(S - a <= d | S > a) / E[min(S - a, d) | S > a],

    the best ratio of the probability to finish within d more service to the expected service spent.
    """

    name = "tiresias-g"
    summary = "largest Gittins index first, from the distribution of service times (NSDI'19)"
    Options = TiresiasGOptions

    def __init__(self, options: object = None, *, rng: np.random.Generator | None = None) -> None:
        super().__init__(options, rng=rng)
        samples = self.options.distribution_gpu_s or _default_service()
        self._samples = np.sort(np.array(samples, np.float64))
        self._table = gittins_table(self._samples)

    def index(self, service_gpu_s: FloatArray) -> FloatArray:
        """Gittins index by attained service."""
        return self._table[np.searchsorted(self._samples, service_gpu_s, side="right")]

    def order(self, view: View, now_s: float) -> IntArray:
        attained = np.maximum(self.service_now(view, now_s), 0.0)
        keys = (view.submit_s, -self.index(attained), view.column("queue"))
        return np.lexsort(keys).astype(np.int32)
