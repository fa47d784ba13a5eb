"""The Trainer's counters follow the job's position: a step may be done again, and a newcomer begins in the middle."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.callbacks import Callback

from shoal.torch.job import Job


def follow(trainer: Any, job: Job, micro: int) -> None:
    """Set the counters to the state before the `micro`-th micro-batch of the next step."""
    position, order = job.position, job.parts.order
    fit, epoch_loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
    done = position.cursor // order.batch_size + micro
    per_epoch = -(-(order.batches.length or 0) // order.batch_size)
    _set(epoch_loop.batch_progress.current, done, done)
    _set(epoch_loop.batch_progress.total, *[position.epoch * per_epoch + done] * 2)
    epoch_loop.batch_progress.is_last_batch = False
    for progress in (fit.epoch_progress.current, fit.epoch_progress.total):
        _set(progress, position.epoch + 1, position.epoch)
    epoch_loop._batches_that_stepped = position.step
    if trainer.lightning_module.automatic_optimization:
        steps = epoch_loop.automatic_optimization.optim_progress.optimizer.step.total
        steps.ready = steps.completed = position.step


def _set(progress: Any, begun: int, done: int) -> None:
    progress.ready = progress.started = begun
    progress.processed = progress.completed = done


class VoidSteps(Callback):
    """Steps that do not count: a newcomer rehearses, or a worker died within a step, which is then done again."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if self._job.parts.steps.is_void or self._job.rehearsing:
            epoch_loop = trainer.fit_loop.epoch_loop
            epoch_loop.batch_progress.current.ready -= 1  # the epoch is not over
            epoch_loop.batch_progress.is_last_batch = False
            epoch_loop._skip_next_val = True
