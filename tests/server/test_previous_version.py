"""A home that the previous version made is started by this one: no snapshot, and three numbers per job at most."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic import command

from shoal.executors.base import WorkerSpec
from shoal.policies.registry import make_policy
from shoal.server.home import Home
from shoal.server.store import migrate, tables

from .fakes import Fleet, run, server

#: The previous server was stopped a moment ago, after 100 s.
BEGAN_S = time.time() - 101.0
SPEC = {
    "command": ["train"], "workdir": "/tmp", "env": {}, "secrets": [], "gpu_types": [], "weight": 1.0,
    "expected_s": 500.0, "iterations": None, "target_loss": None, "requested_gpus": None, "grace_s": 1.0,
    "max_restarts": 0, "autoscale": None,
}  # fmt: skip


def job_row(job: int, state: str, gpus: int, target: list[list[int]]) -> dict[str, Any]:
    return {
        "id": job, "name": f"job-{job}", "user": "admin", "state": state, "spec": SPEC, "given": ["command"],
        "min_gpus": 2, "max_gpus": 2, "requested_gpus": 2, "resize": "never", "model": "train", "gpus": gpus,
        "target_gpus": gpus, "gpu_type": "virtual", "target": target, "generation": 1, "progress": {"next_worker": 2},
        "submitted_s": BEGAN_S + job, "settled_s": BEGAN_S + 100, "started_s": BEGAN_S + 10 if gpus else None,
        "waiting_s": 0.0, "running_s": 90.0, "paused_s": 0.0, "stalled_s": 0.0, "gpu_s": 180.0, "resizes": 0,
        "restarts": 0,
    }  # fmt: skip


def worker_row(job: int, rank: int, gpu: int) -> dict[str, Any]:
    return {
        "id": f"{job}.{rank}", "job": job, "rank": rank, "node": "local", "gpu": gpu, "state": "active",
        "started_s": BEGAN_S + 10,
    }  # fmt: skip


def make_home(path: Path, policy: str, scheduler: dict[str, Any] | None) -> None:
    """Two jobs of 2 GPUs run, one is paused, one waits; made with the schema of the previous version."""
    home = Home(path)
    home.take()
    engine = sa.create_engine(f"sqlite:///{home.database}")
    with engine.begin() as connection:
        config = migrate._config()
        config.attributes["connection"] = connection
        command.upgrade(config, "0001")
    settings = {"policy": {"name": policy, "options": {}}, "plans": 17, "drained": []}
    if scheduler is not None:
        settings["scheduler"] = scheduler
    with engine.begin() as connection:
        connection.execute(
            tables.users.insert(), [{"name": "admin", "role": "admin", "tickets": 1.0, "created_s": 1.0}]
        )
        connection.execute(
            tables.jobs.insert(),
            [job_row(1, "running", 2, [[0, 2]]), job_row(2, "running", 2, [[0, 2]]),
             job_row(3, "paused", 0, []), job_row(4, "pending", 0, [])],
        )  # fmt: skip
        connection.execute(
            tables.workers.insert(),
            [worker_row(job, rank, 2 * job - 2 + rank) for job in (1, 2) for rank in (0, 1)],
        )
        connection.execute(
            tables.settings.insert(), [{"key": key, "value": value} for key, value in settings.items()]
        )
    engine.dispose()
    home.admin_token.write_text("shoal_nothing")
    home.release()


def fleet_of(home: Path) -> Fleet:
    """The workers of the previous server, still running."""
    fleet = Fleet(4)
    for job in (1, 2):
        for rank in (0, 1):
            worker = f"{job}.{rank}"
            fleet.running[worker] = WorkerSpec(
                worker=worker, directory=home, node="local", gpu=2 * job - 2 + rank, command=("train",),
                workdir="/tmp", env={}, grace_s=1.0,
            )  # fmt: skip
    return fleet


@pytest.mark.parametrize("policy", ["fifo", "tiresias-l", "afs-l"])
@pytest.mark.parametrize("kept", ["rows and state", "nothing"])
def test_a_home_of_the_previous_version_goes_on(tmp_path: Path, policy: str, kept: str) -> None:
    columns = make_policy(policy).columns
    old = {
        "policy": policy,
        "state": make_policy(policy).state(),
        "rows": {"1": [0.0, 5.0, 1.0][: len(columns)]},
    }
    make_home(tmp_path, policy, old if kept != "nothing" else None)

    async def story() -> None:
        fleet = fleet_of(tmp_path)
        async with server(tmp_path, fleet=fleet, policy=None) as here:
            await here.until(lambda: here.loop.decided_s is not None)
            assert {j: job.target for j, job in here.loop.jobs.items()} == {
                1: {0: 2},
                2: {0: 2},
                3: {},
                4: {},
            }
            assert (fleet.told, fleet.started) == ([], []), "running workers are left alone"
            assert here.loop.scheduler.plans > 17
            assert 3 in here.loop.scheduler.held
            view = here.loop.scheduler.view
            first = [view.column(name)[view.row(1)] for name in columns]
            if kept != "nothing" and policy == "tiresias-l":
                assert first[1] == 5.0
            assert here.control.store.get("scheduler")["format"] == 2
            for worker in ("1.0", "1.1"):
                fleet.end(worker)
            await here.until(lambda: here.gpus(4) == 2)
            assert here.state(1) == "succeeded"

    run(story())
