"""The worker processes of one standalone job: the wire's `StartWorker` and `StopWorker`, done by a `LocalExecutor`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from shoal.executors.base import Exit, WorkerSpec
from shoal.executors.keeper_files import read_started
from shoal.executors.local import LocalExecutor
from shoal.executors.logs import read_lines

GRACE_S = 5.0
"""How long a worker may take to end after the coordinator has asked it over the wire."""


class JobWorkers:
    """Implements `shoal.wire.service.Executor`. Each worker has the directory `directory/ID` for its keeper's files.

    `running`, `pids`, `signal` and `logs` may be called from any thread, all else on the event loop's thread.
    """

    def __init__(
        self,
        executor: LocalExecutor,
        directory: Path,
        argv: list[str],
        env: dict[str, str],
        on_exit: Callable[[str, str, int | None], None],
        *,
        warm: bool,
    ) -> None:
        """`on_exit` gets the worker, why it ended, and its exit code if nothing killed it."""
        shutil.rmtree(directory, ignore_errors=True)  # of an earlier run with the same worker ids
        self._executor, self._directory, self._on_exit = executor, directory, on_exit
        self._command, self._warm = (sys.executable, *argv), warm
        self.env = env
        self._slots = [(node.name, gpu) for node in executor.nodes() for gpu in range(node.gpus)]
        self._slot_of: dict[str, tuple[str, int]] = {}
        self._printed: dict[str, int] = {}
        executor.on_exit = self._exited

    @property
    def running(self) -> list[str]:
        return list(self._slot_of)

    @property
    def pids(self) -> dict[str, int]:
        """The pid of each running worker whose command has started."""
        started = {w: read_started(self._directory / w) for w in self.running}
        return {w: found.pid for w, found in started.items() if found is not None}

    def start(self, job: str, worker: str) -> None:
        used = Counter(self._slot_of.values())
        node, gpu = self._slot_of[worker] = min(self._slots, key=lambda slot: used[slot])
        self._printed[worker] = 0
        self._executor.start(
            WorkerSpec(
                worker=worker,
                directory=self._directory / worker,
                node=node,
                gpu=gpu,
                command=self._command,
                workdir=os.getcwd(),
                env=self.env
                | self._visible_device(self._slots.index((node, gpu)))
                | {"SHOAL_WORKER": worker},
                grace_s=GRACE_S,
                warm=self._warm,
            )
        )

    @staticmethod
    def _visible_device(slot: int) -> dict[str, str]:
        """One of the devices that the user has chosen for the whole job, if any were chosen."""
        if "CUDA_VISIBLE_DEVICES" not in os.environ:
            return {}
        devices = [d for d in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if d]
        return {"CUDA_VISIBLE_DEVICES": devices[slot % len(devices)] if devices else ""}

    def stop(self, job: str, worker: str, kill: bool) -> None:
        if kill:
            self._executor.stop(worker, kill=True)
        else:
            # The coordinator has asked the worker over the wire. The signal is for a worker that does not answer.
            asyncio.get_running_loop().call_later(GRACE_S, lambda: self._executor.stop(worker, kill=True))

    def _exited(self, exit_: Exit) -> None:
        if exit_.signal is not None:
            why = f"killed by {exit_.signal}"
        else:
            why = f"ended with code {exit_.code}" if exit_.code is not None else exit_.why
        self._on_exit(exit_.worker, why, exit_.code)
        del self._slot_of[exit_.worker]

    async def end_all(self) -> None:
        """Kill all workers and wait until they have ended."""
        for worker in self.running:
            self._executor.stop(worker, kill=True)
        while self._slot_of:
            await asyncio.sleep(0.01)

    def signal(self, worker: str, number: int) -> None:
        """Send a signal to the worker's own process."""
        pid = self.pids.get(worker)
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    # Output

    def logs(self) -> str:
        """The last output of each worker."""
        texts = []
        for path in sorted(self._directory.glob("*")):
            text = "\n".join(line.text for line in read_lines(path, 0))
            if text.strip():
                texts.append(f"--- {path.name}\n{text[-2000:]}")
        return "\n".join(texts)

    def print_output(self) -> None:
        """Print the lines that workers have written since the last call."""
        for worker in self._printed:
            while lines := read_lines(self._directory / worker, self._printed[worker]):
                self._printed[worker] = lines[-1].end
                print(*(line.text for line in lines), sep="\n", flush=True)
