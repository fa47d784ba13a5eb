"""The GPU time that may be spent on trials: a share of all GPU time, saved up for at most an hour."""

from __future__ import annotations

from dataclasses import dataclass

SAVED_UP_S = 3600.0


@dataclass(slots=True)
class Budget:
    """In any t seconds, trials take at most `share` * (t + an hour) of the cluster's GPU time.

    A GPU counts while it is not where the policy would have it.
    """

    share: float
    left_gpu_s: float = 0.0
    settled_s: float | None = None
    spent_gpu_s: float = 0.0

    def most_gpu_s(self, total_gpus: int) -> float:
        """What can be saved up. A trial that takes more can never begin."""
        return self.share * total_gpus * SAVED_UP_S

    def settle(self, now_s: float, total_gpus: int, moved_gpus: int) -> None:
        """Count the time since the last call, in which `moved_gpus` were in trials."""
        most = self.most_gpu_s(total_gpus)
        if self.settled_s is None:
            self.left_gpu_s = most
        else:
            span_s = max(now_s - self.settled_s, 0.0)
            self.spent_gpu_s += moved_gpus * span_s
            self.left_gpu_s += (self.share * total_gpus - moved_gpus) * span_s
        self.left_gpu_s = min(self.left_gpu_s, most)
        self.settled_s = now_s

    def wait_s(self, gpu_s: float, total_gpus: int) -> float:
        """Seconds until so much may be spent, if it can be saved up."""
        return max(gpu_s - self.left_gpu_s, 0.0) / (self.share * total_gpus)
