"""An executor for one machine: worker processes, forked from a zygote where that is safe, else started cold."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

from shoal.torch.zygote import Zygote

GRACE_S = 5.0


class Processes:
    """The executor: worker processes here, forked from a zygote where that is safe, else started cold."""

    def __init__(
        self, argv: list[str], env: dict[str, str], output: Callable[[str], str | None], zygote: Zygote | None
    ) -> None:
        self._argv, self._env, self._output = argv, env, output
        self.zygote = zygote
        self.pids: dict[str, int] = {}
        self.started_warm: dict[str, bool] = {}
        self.on_exit: Callable[[str, int], None] = lambda worker, code: None
        self._workers: dict[int, str] = {}
        self._early: dict[int, int] = {}
        self._lock = threading.Lock()

    def start(self, job: str, worker: str) -> None:
        threading.Thread(target=self._start, args=(worker,), daemon=True).start()

    def _start(self, worker: str) -> None:
        env = {**self._env, "SHOAL_WORKER": worker}
        output = self._output(worker)
        pid = self.zygote.start(self._argv, env, os.getcwd(), output) if self.zygote else None
        self.started_warm[worker] = pid is not None
        if pid is None:
            pid = self._start_cold(worker, env, output)
        with self._lock:
            self.pids[worker], self._workers[pid] = pid, worker
            code = self._early.pop(pid, None)
        if code is not None:
            self.on_exit(worker, code)

    def _start_cold(self, worker: str, env: dict[str, str], output: str | None) -> int:
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(open(output, "ab")) if output else None
            process = subprocess.Popen(
                [sys.executable, *self._argv],
                env={**os.environ, **env},
                stdout=file,
                stderr=subprocess.STDOUT if file else None,
                start_new_session=True,
            )
        threading.Thread(target=lambda: self.ended(process.pid, process.wait()), daemon=True).start()
        return process.pid

    def ended(self, pid: int, code: int) -> None:
        with self._lock:
            worker = self._workers.pop(pid, None)
            if worker is None:
                self._early[pid] = code
                return
            self.pids.pop(worker, None)
        self.on_exit(worker, code)

    def stop(self, job: str, worker: str, kill: bool) -> None:
        threading.Thread(target=self._stop, args=(worker, kill), daemon=True).start()

    def _stop(self, worker: str, kill: bool) -> None:
        # Asked to end over the wire already; the signals are for one that does not listen.
        deadline_s = time.monotonic() + (0.0 if kill else GRACE_S)
        while worker in self.pids and time.monotonic() < deadline_s:
            time.sleep(0.05)
        self.signal(worker, signal.SIGKILL)

    def signal(self, worker: str, number: int) -> None:
        pid = self.pids.get(worker)
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def close(self) -> None:
        for worker in list(self.pids):
            self.signal(worker, signal.SIGKILL)
