"""The executor of docs/executors.md is complete: a job runs to its end on it."""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
from pathlib import Path
from typing import Any

from shoal.executors.base import Executor
from shoal.server.api.models import JobSpec
from shoal.server.control import Control
from shoal.server.options import Options

from .fakes import run

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "manual_executor.py"


def manual_executor() -> Any:
    spec = importlib.util.spec_from_file_location("manual_executor", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.ManualExecutor()


def test_the_documented_executor_has_every_method_of_the_interface() -> None:
    wanted = {name for name, _ in inspect.getmembers(Executor, inspect.isfunction) if name[0] != "_"}
    assert wanted <= set(dir(manual_executor()))


def test_a_job_starts_and_succeeds_on_the_documented_executor(tmp_path: Path) -> None:
    async def story() -> None:
        executor = manual_executor()
        control = Control(Options(tmp_path / "home"), executor=executor)
        control.make_admin()
        await control.loop.start()
        try:
            spec = JobSpec(command=["train"], gpus="2", per_gpu=True, workdir="/tmp")
            job, _ = await control.services.submit.submit(spec, "admin")
            await until(lambda: len(executor.running) == 2)
            for worker in list(executor.running):
                executor.finish(worker)
            await until(lambda: control.store.job(job)["state"] == "succeeded")
        finally:
            await control.close()

    run(story())


async def until(condition: Any) -> None:
    """Let the event loop turn until the condition holds; the test's own time limit ends a wait in vain."""
    while not condition():
        await asyncio.sleep(0.01)
