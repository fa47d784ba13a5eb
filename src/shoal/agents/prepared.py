"""An executor that gives each worker its uploaded working directory before another executor starts it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

from shoal.agents.trees import TreeError
from shoal.executors.base import Executor, Exit, GpuUsage, NodeChange, NodeInfo, RunAs, WorkerSpec
from shoal.executors.logs import Line

log = logging.getLogger("shoal.agents")

Prepare = Callable[[str, str, RunAs], Coroutine[Any, Any, Path]]


def job_of(worker: str) -> str:
    """The job in the id of a worker, `17.3`."""
    return worker.rpartition(".")[0] or worker


class PreparingExecutor:
    """Implements `shoal.executors.base.Executor`. `prepare` makes a job's directory: content, account."""

    def __init__(self, inner: Executor, prepare: Prepare) -> None:
        self.name = inner.name
        self.inner, self._prepare = inner, prepare
        self._preparing: dict[str, asyncio.Task[None]] = {}
        #: What was said to workers that have not started yet.
        self._suspended: set[str] = set()
        self._may_go: set[str] = set()

    @property
    def on_exit(self) -> Callable[[Exit], None]:
        return self.inner.on_exit

    @on_exit.setter
    def on_exit(self, report: Callable[[Exit], None]) -> None:
        self.inner.on_exit = report

    @property
    def on_node(self) -> Callable[[NodeChange], None]:
        return self.inner.on_node

    @on_node.setter
    def on_node(self, report: Callable[[NodeChange], None]) -> None:
        self.inner.on_node = report

    def start(self, worker: WorkerSpec) -> None:
        if not worker.tree:
            self.inner.start(worker)
            return
        task = asyncio.get_running_loop().create_task(self._start(worker))
        self._preparing[worker.worker] = task

    async def _start(self, worker: WorkerSpec) -> None:
        try:
            directory = await self._prepare(job_of(worker.worker), worker.tree, worker.account)
        except Exception as error:  # whatever it is, the worker must not stay without a beginning and an end
            if not isinstance(error, TreeError):
                log.exception("the working directory of worker %s was not prepared", worker.worker)
            self._never_began(worker.worker, f"its working directory is not available: {error}")
            return
        del self._preparing[worker.worker]
        env = worker.env | {"PWD": str(directory)}
        try:
            self.inner.start(replace(worker, workdir=str(directory), env=env))
        except Exception as error:
            log.exception("worker %s was not started", worker.worker)
            self._never_began(worker.worker, f"it cannot be started: {error}")
            return
        if worker.worker in self._may_go:
            self._may_go.discard(worker.worker)
            self.inner.go(worker.worker)
        if worker.worker in self._suspended:
            self._suspended.discard(worker.worker)
            self.inner.suspend(worker.worker)

    def _never_began(self, worker: str, why: str, *, asked_to_end: bool = False) -> None:
        self._preparing.pop(worker, None)
        self._suspended.discard(worker)
        self._may_go.discard(worker)
        self.on_exit(Exit(worker, None, None, why, began=False, asked_to_end=asked_to_end))

    def stop(self, worker: str, *, kill: bool = False) -> None:
        task = self._preparing.get(worker)
        if task is None:
            self.inner.stop(worker, kill=kill)
            return
        task.cancel()
        why = "it was ended before it began"
        asyncio.get_running_loop().call_soon(lambda: self._never_began(worker, why, asked_to_end=True))

    def suspend(self, worker: str) -> None:
        if worker in self._preparing:
            self._suspended.add(worker)
        else:
            self.inner.suspend(worker)

    def wake(self, worker: str) -> None:
        if worker in self._preparing:
            self._suspended.discard(worker)
        else:
            self.inner.wake(worker)

    def warn(self, worker: str, signal: str) -> None:
        if worker not in self._preparing:
            self.inner.warn(worker, signal)

    def go(self, worker: str) -> None:
        if worker in self._preparing:
            self._may_go.add(worker)
        else:
            self.inner.go(worker)

    def free_port(self, node: str) -> int:
        return self.inner.free_port(node)

    def nodes(self) -> tuple[NodeInfo, ...]:
        return self.inner.nodes()

    def awaited_nodes(self) -> tuple[NodeInfo, ...]:
        return self.inner.awaited_nodes()

    def adopt(self, worker: str, directory: Path) -> None:
        self.inner.adopt(worker, directory)

    def logs(self, directory: Path, begin: int, max_bytes: int = 256 * 1024) -> list[Line]:
        return self.inner.logs(directory, begin, max_bytes)

    def tail_position(self, directory: Path, lines: int) -> int:
        return self.inner.tail_position(directory, lines)

    def usage(self) -> dict[tuple[str, int], GpuUsage]:
        return self.inner.usage()

    def warm_up(self) -> None:
        self.inner.warm_up()

    def close(self) -> None:
        for task in self._preparing.values():
            task.cancel()
        self.inner.close()
