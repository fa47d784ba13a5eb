"""This worker's copy of what the job trains: the model, the optimizer and their gradient buckets.

All parts of a job reach the model through a `Replica`. A job with several optimizers or a sharded model changes what
is in it, not who uses it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from shoal.torch.gradients import GradientBuckets
from shoal.torch.state import ModelState, StateBox
from torch import nn


class Replica:
    """Empty until `job.wrap`."""

    def __init__(self, box: StateBox) -> None:
        self.box = box
        #: None outside Shoal, where there is nothing to synchronize.
        self.buckets: GradientBuckets | None = None
        self._state: ModelState | None = None

    @property
    def state(self) -> ModelState:
        if self._state is None:
            raise RuntimeError("call job.wrap(model, optimizer) before training")
        return self._state

    @property
    def least_samples(self) -> int:
        """Fewest samples that a worker can train on. Batch norm does not train on a single one."""
        modules = self.state.model.modules()
        return 2 if any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in modules) else 1

    @property
    def on_gpu(self) -> bool:
        return any(p.is_cuda for p in self.state.model.parameters())

    def wrap(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if self._state is not None:
            raise RuntimeError("wrap() was called twice: put all parameters into one model and one optimizer")
        self._state = ModelState(model, optimizer, self.box)

    def synchronize(self, bucket_mib: float, complete: Callable[[], None]) -> None:
        """Put the gradients into buckets. `complete` is called at the end of each armed backward."""
        state = self.state
        self.buckets = GradientBuckets(state.model, bucket_mib, complete=complete, others=state.others)

    def keep_stats(self) -> None:
        if self.buckets is not None:
            self.buckets.keep_stats()
