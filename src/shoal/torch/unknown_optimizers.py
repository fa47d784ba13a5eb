"""Optimizers that train within `job.epochs`, although the job does not know them: each worker would train alone.

An optimizer for something else is left alone: one made for a single batch (an adversarial example), or one that steps
outside of the training steps (a probe in an evaluation). So an unknown optimizer is an error if it updates the job's
own parameters, or steps in two training steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from torch.optim.optimizer import register_optimizer_step_pre_hook

import torch
from shoal.torch.replica import Replica
from shoal.torch.session import Session
from shoal.torch.step import Steps


class UnknownOptimizers:
    def __init__(self, session: Session, replica: Replica, steps: Steps) -> None:
        self._session, self._replica, self._steps = session, replica, steps
        self._inside = 0  # of the steps of optimizers that the job knows
        self._seen: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()  # -> its first step

    @contextmanager
    def refused(self) -> Iterator[None]:
        if self._session.outside_shoal:
            yield
            return
        hook = register_optimizer_step_pre_hook(self._before_step)
        try:
            yield
        finally:
            hook.remove()

    @contextmanager
    def known_step(self) -> Iterator[None]:
        """An optimizer that the job knows may call others."""
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._inside or not self._session.training or not self._steps.counts:
            return
        state = self._replica.state
        known = {id(group) for one in state.optimizers for group in one.param_groups}
        if any(id(group) in known for group in optimizer.param_groups):
            return  # it is a wrapper of one that the job knows
        mine = {id(p) for p in state.parameters}
        updates_mine = any(id(p) in mine for group in optimizer.param_groups for p in group["params"])
        if updates_mine or self._lives_on(optimizer):
            raise RuntimeError(
                f"the job does not know the optimizer {type(optimizer).__name__}, which has stepped within "
                "job.epochs(): its gradients are not summed over the workers, and new workers do not receive its "
                "state. Give all models and their optimizers to the job: job.wrap(models=[...], optimizers=[...])"
            )

    def _lives_on(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether it steps in a training step after the one in which it was first seen."""
        if self._steps.present is None:
            return False
        step = self._session.done
        return self._seen.setdefault(optimizer, step) != step
