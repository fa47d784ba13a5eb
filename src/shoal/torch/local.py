"""The runtime standing alone: a coordinator and worker processes on this machine, driven by calls.

with LocalJob(["train.py"], workers=2) as job:
    job.resize(3)
    job.wait(lambda e: isinstance(e, GenerationCommitted) and len(e.members) == 3)
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from shoal.torch.processes import Processes
from shoal.torch.zygote import Zygote
from shoal.wire import events as ev
from shoal.wire.auth import new_secret, write_secret
from shoal.wire.messages import Answer, Ask, Report, Resize
from shoal.wire.service import ControlService, JobHandle
from shoal.wire.state import Timing

_T = TypeVar("_T")


#: What a user may set for all workers; who they are is told by the launcher.
SETTINGS = ("SHOAL_CHECKED", "SHOAL_STATE_BYTES_PER_S")


class LocalJob:
    """One job on this machine. All methods may be called from any thread."""

    def __init__(
        self,
        argv: list[str],
        workers: int,
        *,
        directory: str | Path | None = None,
        env: dict[str, str] | None = None,
        warm: bool = True,
        preload: tuple[str, ...] = (),
        keep_size: bool = True,
        replace_stragglers: bool = False,
        timing: Timing | None = None,
        quiet: bool = True,
        zygote: Zygote | None = None,
        begin_from: str | Path | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        if workers < 1:
            raise ValueError(f"a job needs at least one worker, not {workers}")
        if not Path(argv[0]).is_file():
            raise ValueError(f"there is no script {argv[0]}")
        if begin_from is not None and not Path(begin_from).is_file():
            raise ValueError(f"there is no checkpoint {begin_from}")
        self.directory = Path(directory or tempfile.mkdtemp(prefix="shoal-"))
        self.directory.mkdir(parents=True, exist_ok=True)
        self.secret = new_secret()
        secret_file = self.directory / "secret"
        secret_file.unlink(missing_ok=True)
        write_secret(secret_file, self.secret)
        self.events: list[tuple[float, ev.JobEvent]] = []
        self.changed = threading.Condition()
        self._reports: dict[str, Report] = {}
        self.size, self._count = workers, 0
        self._keep_size, self._replace_stragglers = keep_size, replace_stragglers
        self._losses: list[float] = []
        self._begin_from = begin_from
        self._timing, self._where = timing, (host, port)
        self._own_zygote = Zygote(preload=preload) if warm and zygote is None else None
        self._zygote = zygote or self._own_zygote
        env = {
            **{name: os.environ[name] for name in SETTINGS if name in os.environ},
            "SHOAL_JOB": "local",
            "SHOAL_SECRET_FILE": str(secret_file),
            "SHOAL_CHECKPOINT": str(self.directory / "checkpoint.pt"),
            "SHOAL_PATIENCE_S": "20",  # this launcher does not come back
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            **(env or {}),
        }
        self.processes = Processes(argv, env, self._output if quiet else lambda w: None, self._zygote)
        if self._zygote is not None:
            self._zygote.listeners.append(self.processes.ended)
        self._env = env
        self.handle: JobHandle | None = None
        self.service: ControlService | None = None
        self._ended = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="shoal-launch", daemon=True)

    def _output(self, worker: str) -> str:
        return str(self.directory / f"{worker}.log")

    def __enter__(self) -> LocalJob:
        self._thread.start()
        if self._zygote is not None:
            self._zygote.wait_ready()
        self._call(self._begin()).result(30)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.processes.close()
        with contextlib.suppress(Exception):
            self._call(self._wind_up()).result(10)
        if self._zygote is not None:
            self._zygote.listeners.remove(self.processes.ended)
        if self._own_zygote is not None:
            self._own_zygote.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        if not self._thread.is_alive():
            self._loop.close()

    def _call(self, work: Any) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _begin(self) -> None:
        await self.start_service(None)
        if self._begin_from is not None:
            assert self.handle is not None
            self.handle.coordinator.checkpoint = os.path.abspath(self._begin_from)
        self._aim(self.new_workers(self.size))

    async def start_service(self, restore: dict[str, Any] | None) -> None:
        self.service = ControlService(self.processes, on_event=lambda _, event: self._on_event(event))
        await self.service.start(*self._where)
        self._where = (self._where[0], int(self.service.address.rpartition(":")[2]))
        self.handle = self.service.add(
            "local",
            self.secret,
            restore=restore,
            timing=self._timing,
            pause_path=str(self.directory / "paused.pt"),
            on_request=self.request,
        )
        self._env["SHOAL_CONTROL"] = self.service.address
        self.processes._env = self._env
        (self.directory / "address").write_text(self.service.address)
        self.processes.on_exit = self._on_exit

    def _on_exit(self, worker: str, code: int) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has closed
            self._loop.call_soon_threadsafe(self._exited, worker, code)

    def _exited(self, worker: str, code: int) -> None:
        if self.handle is not None and not self._ended:
            why = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
            self.handle.exited(worker, why)

    async def _end(self) -> None:
        if self.service is not None:
            await self.service.close()

    async def _wind_up(self) -> None:
        self._ended = True  # who ends from now on, because this does, is of no consequence
        await self._end()
        rest = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

    def stop_control(self) -> dict[str, Any]:
        """Drop the control service as if its process had died; what it would have on record."""
        assert self.handle is not None
        state = self.handle.coordinator.to_dict()
        self._call(self._end()).result(10)
        return state

    def start_control(self, state: dict[str, Any] | None) -> None:
        """Another control service at the same address, with or without memory."""
        self._call(self.start_service(state)).result(10)

    # Changing it

    def new_workers(self, count: int) -> list[str]:
        self._count += count
        return [f"w{i}" for i in range(self._count - count, self._count)]

    def _aim(self, workers: list[str]) -> None:
        assert self.handle is not None
        self.handle.set_target(workers)

    def _present(self) -> list[str]:
        assert self.handle is not None
        workers = self.handle.coordinator.workers
        return [w for w in self.handle.coordinator.target if workers[w].alive]

    def target(self, workers: list[str]) -> None:
        self._do(lambda: self._aim(workers))

    def resize(self, size: int) -> None:
        self._do(lambda: self._resize(size))

    def _resize(self, size: int) -> None:
        if size < 0:
            raise ValueError(f"a job cannot have {size} workers")
        present, self.size = self._present(), size
        self._aim(present[:size] + self.new_workers(max(0, size - len(present))))

    def replace(self, *workers: str) -> None:
        """New workers in the place of these."""
        self._do(lambda: self._replace(workers))

    def _replace(self, workers: tuple[str, ...]) -> None:
        present = self._present()
        unknown = [w for w in workers if w not in present]
        if unknown:
            raise ValueError(f"there is no worker {unknown[0]!r}; there are {', '.join(present)}")
        self._aim([w for w in present if w not in workers] + self.new_workers(len(workers)))

    def migrate(self) -> None:
        """All workers out, as many new ones in."""
        self._do(lambda: self._aim(self.new_workers(len(self._present()))))

    def pause(self) -> None:
        self._do(lambda: self._aim([]))

    def checkpoint(self) -> None:
        assert self.handle is not None
        self._do(self.handle.ask_checkpoint)

    def stop(self) -> None:
        assert self.handle is not None
        self._do(lambda: self.handle.stop("stopped by its user"))  # type: ignore[union-attr]

    def kill(self, worker: str, number: int = signal.SIGKILL) -> None:
        self.processes.signal(worker, number)

    def _do(self, act: Callable[[], _T]) -> _T:
        async def run() -> _T:
            return act()

        return self._call(run()).result(30)

    def request(self, message: Resize | Ask) -> Answer:
        """What the command line asks for."""
        assert self.handle is not None
        if isinstance(message, Resize):
            if message.fresh:
                self._aim(self.new_workers(len(self._present())))
            elif message.replace:
                self._replace(message.replace)
            else:
                self._resize(message.workers)
            return Answer(True, f"the job shall have {len(self.handle.coordinator.target)} workers")
        if message.what == "status":
            return Answer(True, data=self.summary())
        actions: dict[str, Callable[[], None]] = {
            "pause": lambda: self._aim([]),
            "checkpoint": self.handle.ask_checkpoint,
            "stop": lambda: self.handle.stop("stopped by its user"),  # type: ignore[union-attr]
        }
        if message.what not in actions:
            raise ValueError(f"unknown request {message.what!r}")
        actions[message.what]()
        return Answer(True, message.what)

    def summary(self) -> dict[str, Any]:
        assert self.handle is not None
        c = self.handle.coordinator
        reports = self._reports
        furthest = max((r.step for r in reports.values()), default=0)
        total = max((r.total_steps for r in reports.values()), default=0)
        return {
            "generation": c.active.number if c.active else 0,
            "workers": [w for w in c.active.members if w not in c.learners()] if c.active else [],
            "pids": dict(self.processes.pids),
            "target": list(c.target),
            "outcome": c.outcome or ("paused" if c.paused else "running"),
            "step": furthest,
            "total_steps": total,
        }

    # Watching it

    def _on_event(self, event: ev.JobEvent) -> None:
        with self.changed:
            self.events.append((time.monotonic(), event))
            if isinstance(event, ev.Measured):
                self._reports[event.worker] = event.report
            self.changed.notify_all()
        self._loop.call_soon(self._respond, event)

    def _respond(self, event: ev.JobEvent) -> None:
        lost = isinstance(event, ev.WorkerLost) and event.was_member
        if self.handle is None or self.handle.coordinator.outcome is not None:
            return
        if (lost or isinstance(event, ev.JobStranded)) and self._keep_size and self.size:
            now_s = time.monotonic()
            self._losses = [t for t in self._losses if now_s - t < 60.0] + [now_s]
            if len(self._losses) > 10:
                self.handle.stop("workers die again and again: more than 10 in a minute")
            elif len(self._present()) < self.size and not self.handle.coordinator.pausing:
                self._resize(self.size)
        elif isinstance(event, ev.JobStranded):
            self.handle.stop(event.why)
        if (
            isinstance(event, ev.StragglerFound)
            and self._replace_stragglers
            and event.worker in self._present()
        ):
            self._replace((event.worker,))

    def wait(
        self, when: Callable[[ev.JobEvent], Any], timeout_s: float = 60.0, since: int = 0
    ) -> ev.JobEvent:
        """The first event, from the `since`-th on, for which `when` is true."""
        deadline_s = time.monotonic() + timeout_s
        index = since
        with self.changed:
            while True:
                while index < len(self.events):
                    if when(self.events[index][1]):
                        return self.events[index][1]
                    if isinstance(self.events[index][1], ev.JobFailed):
                        raise RuntimeError(f"the job failed: {self.events[index][1]}\n{self.logs()}")
                    index += 1
                left_s = deadline_s - time.monotonic()
                if left_s <= 0 or not self.changed.wait(left_s):
                    told = [e for _, e in self.events if not isinstance(e, ev.Measured)]
                    raise TimeoutError(f"did not happen in {timeout_s} s; so far: {told[-8:]}\n{self.logs()}")

    def wait_size(self, size: int, timeout_s: float = 60.0, since: int = 0) -> ev.JobEvent:
        return self.wait(
            lambda e: isinstance(e, ev.GenerationCommitted) and len(e.members) == size, timeout_s, since
        )

    def wait_end(self, timeout_s: float = 120.0) -> ev.JobEvent:
        return self.wait(lambda e: isinstance(e, (ev.JobFinished, ev.JobFailed)), timeout_s)

    def wait_gone(self, timeout_s: float = 600.0) -> None:
        """Until all processes have ended by themselves: a script may still evaluate and save."""
        deadline_s = time.monotonic() + timeout_s
        while self.processes.pids and time.monotonic() < deadline_s:
            time.sleep(0.05)

    def logs(self) -> str:
        texts = []
        for path in sorted(self.directory.glob("w*.log")):
            text = path.read_text(errors="replace")
            if text.strip():
                texts.append(f"--- {path.name}\n{text[-2000:]}")
        return "\n".join(texts)
