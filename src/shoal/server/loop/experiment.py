"""One experiment is one run: the names under which trackers of experiments know a job, the same after every restart."""

from __future__ import annotations

import hashlib
import json

from shoal.server.loop.live_job import LiveJob


def run_id(job: LiveJob) -> str:
    """Derived from the job's id. The time of its submission tells jobs of two servers apart."""
    born = hashlib.sha256(f"{job.id} {job.name} {job.life.submitted_s!r}".encode()).hexdigest()
    return f"shoal-{job.id}-{born[:8]}"


def tracker_environment(job: LiveJob) -> dict[str, str]:
    """For W&B, MLflow and TensorBoard. What the job's own environment sets takes precedence."""
    run = run_id(job)
    return {
        "SHOAL_RUN_ID": run,
        "WANDB_RUN_ID": run,
        "WANDB_RESUME": "allow",
        "WANDB_NAME": job.name,
        # MLflow makes the ids of its runs itself: a run is found again by this tag.
        "MLFLOW_RUN_CONTEXT": json.dumps({"mlflow.runName": job.name, "shoal.run": run}),
        "TENSORBOARD_LOGGING_DIR": f"runs/{run}",
    }
