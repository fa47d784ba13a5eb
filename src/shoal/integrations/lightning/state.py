"""What a Lightning Trainer knows besides model, optimizers and schedulers, as an entry of `job.state`."""

from __future__ import annotations

import copy
from typing import Any

from lightning.pytorch.callbacks import ModelCheckpoint

from shoal.integrations.lightning.metrics import forget
from shoal.torch.job import Job


class TravellingState:
    """Callbacks (early stopping, best checkpoints), loggers and counters that do not follow from the position."""

    def __init__(self, trainer: Any, job: Job) -> None:
        self._trainer, self._job = trainer, job

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        manual = trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress
        return {
            "callbacks": [copy.copy(cb.state_dict()) for cb in trainer.callbacks],
            "directories": [getattr(cb, "dirpath", None) for cb in trainer.callbacks],
            "loggers": [getattr(logger, "version", None) for logger in trainer.loggers],
            "should_stop": trainer.should_stop,
            "manual_steps": manual.total.completed,
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        trainer = self._trainer
        for callback, state, directory in zip(
            trainer.callbacks, saved["callbacks"], saved["directories"], strict=True
        ):
            if directory is not None:
                callback.dirpath = directory
            if state:
                callback.load_state_dict(state)
            if isinstance(callback, ModelCheckpoint):
                callback.current_score = state["current_score"]  # which it leaves out itself
        for logger, version in zip(trainer.loggers, saved["loggers"], strict=True):
            for name in ("_version", "_run_id"):  # the latter is MLflow's
                if hasattr(logger, name):
                    setattr(logger, name, version)  # one run, whichever worker writes it
        trainer.should_stop = saved["should_stop"]
        manual = trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress.total
        manual.ready = manual.completed = saved["manual_steps"]
        if self._job.parts.steps.present is not None:
            forget(trainer.fit_loop.epoch_loop._results)  # a newcomer's own batches so far did not count
