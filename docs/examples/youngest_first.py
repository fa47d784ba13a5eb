"""A policy of one's own: the jobs that came last go first, each with up to `most` GPUs."""

from dataclasses import dataclass

import numpy as np

from shoal.policies.base import CountPolicy


@dataclass(frozen=True)
class Options:
    #: The most GPUs a job gets.
    most: int = 4


class YoungestFirst(CountPolicy):
    """Last in, first out: order by submission, latest first; a job gets min(most, max, what is left)."""

    name = "youngest-first"
    summary = "last in, first out"
    Options = Options

    def wish_gpus(self, view):
        return np.clip(self.options.most, view.min_gpus, view.max_gpus)

    def shares(self, view, gpus, now_s):
        shares = np.zeros(len(view), np.int32)
        for row in reversed(range(len(view))):
            take = min(self.wish_gpus(view)[row], gpus)
            if take >= view.min_gpus[row]:
                shares[row] = take
                gpus -= take
        return shares
