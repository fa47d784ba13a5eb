"""One experiment is one run of W&B, MLflow and TensorBoard, over resizes, restarts of workers and of the server."""

from __future__ import annotations

import json
from pathlib import Path

from .fakes import Fleet, run, server

NAMES = ("WANDB_RUN_ID", "WANDB_RESUME", "MLFLOW_RUN_CONTEXT", "TENSORBOARD_LOGGING_DIR", "SHOAL_RUN_ID")


def names_of(fleet: Fleet, worker: str) -> dict[str, str]:
    return {name: fleet.running[worker].env[name] for name in NAMES}


def test_all_workers_that_a_job_ever_has_log_to_one_run(tmp_path: Path) -> None:
    fleet = Fleet(4)

    async def story() -> None:
        async with server(tmp_path, fleet=fleet, kill=True) as here:
            job = (await here.submit("1..2", resize="live", env={"WANDB_NAME": "mine"}))["id"]
            other = (await here.submit("1", resize="live"))["id"]
            await here.until(lambda: len(fleet.crew(job)) == 2 and fleet.crew(other), train=(job,))
            first = names_of(fleet, fleet.crew(job)[0].id)
            assert all(names_of(fleet, worker.id) == first for worker in fleet.crew(job))
            assert first["WANDB_RUN_ID"] != names_of(fleet, fleet.crew(other)[0].id)["WANDB_RUN_ID"]
            assert first["WANDB_RUN_ID"].startswith(f"shoal-{job}-")
            assert json.loads(first["MLFLOW_RUN_CONTEXT"])["shoal.run"] == first["SHOAL_RUN_ID"]
            assert first["TENSORBOARD_LOGGING_DIR"] == f"runs/{first['SHOAL_RUN_ID']}"
            assert fleet.running[fleet.crew(job)[0].id].env["WANDB_NAME"] == "mine", "the job's own value"
        async with server(tmp_path, fleet=fleet) as here:
            before = set(fleet.started)
            fleet.end(fleet.crew(job)[1].id, None, "SIGKILL")
            await here.until(lambda: set(fleet.started) - before, train=(job,))
            (newcomer,) = set(fleet.started) - before
            assert names_of(fleet, newcomer) == first, "a worker that another server has started"

    run(story())
