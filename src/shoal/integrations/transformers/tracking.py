"""One experiment is one run of MLflow, which makes the ids of its runs itself and knows the job by a tag only."""

from __future__ import annotations

import os
from typing import Any

from transformers import TrainerCallback
from transformers.integrations import MLflowCallback

RUN_ID = "MLFLOW_RUN_ID"
"""Tells MLflow to go on with a run."""


class SameRun(TrainerCallback):
    """Comes before MLflow's callback: a worker that is rank 0 from now on goes on with the run of the job."""

    def __init__(self, handler: Any) -> None:
        self._handler = handler

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        job = os.environ.get("SHOAL_RUN_ID")
        logs = any(isinstance(callback, MLflowCallback) for callback in self._handler.callbacks)
        if not (job and logs and state.is_world_process_zero) or RUN_ID in os.environ:
            return
        import mlflow

        if mlflow.active_run() is not None:
            return  # the script's own
        runs = mlflow.search_runs(
            filter_string=f"tags.`shoal.run` = '{job}'", search_all_experiments=True, output_format="list"
        )
        if runs:
            os.environ[RUN_ID] = runs[0].info.run_id
