"""The Trainer's own state as an entry of `job.state`: a newcomer receives it, and a step done again starts from it."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

from transformers.trainer_callback import ExportableState

_OF_THE_WORKER = (
    *("is_local_process_zero", "is_world_process_zero", "stateful_callbacks"),
    *("total_flos", "num_input_tokens_seen"),
)


class TravellingState:
    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        fields = {f.name: getattr(trainer.state, f.name) for f in dataclasses.fields(trainer.state)}
        return {
            "state": {k: copy.copy(v) for k, v in fields.items() if k not in _OF_THE_WORKER},
            "callbacks": [cb.state()["attributes"] for cb in self._stateful()],
            "control": dict(vars(trainer.control)),
            "loss": float(getattr(trainer, "_tr_loss", 0.0)),
            "total_loss": getattr(trainer, "_total_loss_scalar", 0.0),
            "last_logged": getattr(trainer, "_globalstep_last_logged", 0),
            "initial_step": getattr(trainer, "_initial_global_step", 0),
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        trainer = self._trainer
        for name, value in saved["state"].items():
            setattr(trainer.state, name, value)
        for callback, attributes in zip(self._stateful(), saved["callbacks"], strict=True):
            vars(callback).update(attributes)
        vars(trainer.control).update(saved["control"])
        if hasattr(trainer, "_tr_loss"):
            trainer._tr_loss.fill_(saved["loss"])
        trainer._total_loss_scalar = saved["total_loss"]
        trainer._globalstep_last_logged = saved["last_logged"]
        trainer._initial_global_step = saved["initial_step"]

    def _stateful(self) -> list[Any]:
        """Callbacks with a state that the Trainer would save: early stopping, for example."""
        return [cb for cb in self._trainer.callback_handler.callbacks if isinstance(cb, ExportableState)]
