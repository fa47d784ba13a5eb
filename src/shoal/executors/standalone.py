"""An elastic job on this machine without a server: a `ControlService` and a `LocalExecutor`, driven by calls.

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
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from shoal.executors.job_workers import JobWorkers
from shoal.executors.local import LocalExecutor
from shoal.executors.zygote import Zygote
from shoal.wire import events as ev
from shoal.wire.auth import new_secret, write_secret
from shoal.wire.messages import Answer, Ask, Report, Resize
from shoal.wire.service import ControlService, JobHandle
from shoal.wire.state import Timing

_T = TypeVar("_T")

#: Variables that a user may set for all workers. The launcher sets all other SHOAL_ variables.
SETTINGS = ("SHOAL_CHECKED", "SHOAL_STATE_BYTES_PER_S")
MAX_LOSSES_PER_MINUTE = 10
OUTPUT_INTERVAL_S = 0.1
"""How often the output of workers is printed."""


class LocalJob:
    """One job on this machine. All public methods may be called from any thread.

    `keep_size` replaces workers that die; `quiet=False` prints the workers' output; `begin_from` is a checkpoint of
    an earlier run; a `zygote` may be shared by several jobs.
    """

    def __init__(
        self,
        argv: list[str],
        workers: int,
        *,
        directory: str | Path | None = None,
        env: dict[str, str] | None = None,
        warm: bool = True,
        keep_size: bool = True,
        replace_stragglers: bool = False,
        timing: Timing | None = None,
        quiet: bool = True,
        zygote: Zygote | None = None,
        begin_from: str | Path | None = None,
    ) -> None:
        if workers < 1:
            raise ValueError(f"a job needs at least one worker, not {workers}")
        if not Path(argv[0]).is_file():
            raise ValueError(f"there is no script {argv[0]}")
        if begin_from is not None and not Path(begin_from).is_file():
            raise ValueError(f"there is no checkpoint {begin_from}")
        self.directory = Path(directory or tempfile.mkdtemp(prefix="shoal-")).absolute()
        self.directory.mkdir(parents=True, exist_ok=True)
        self.secret = new_secret()
        secret_file = self.directory / "secret"
        secret_file.unlink(missing_ok=True)
        write_secret(secret_file, self.secret)
        self.size, self._count = workers, 0
        self._keep_size, self._replace_stragglers = keep_size, replace_stragglers
        self._timing, self._quiet, self._begin_from = timing, quiet, begin_from
        self._losses_s: list[float] = []
        self._reports: dict[str, Report] = {}
        self.events: list[tuple[float, ev.JobEvent]] = []
        self.changed = threading.Condition()
        #: The first worker whose script failed after the training was done, and how.
        self.failed_after_end: str | None = None
        self._own_zygote = Zygote() if warm and zygote is None else None
        self.executor = LocalExecutor(zygote=zygote or self._own_zygote)
        own_env = {
            "SHOAL_JOB": "local",
            "SHOAL_SECRET_FILE": str(secret_file),
            "SHOAL_CHECKPOINT": str(self.directory / "checkpoint.pt"),
            "SHOAL_PATIENCE_S": "20",  # this launcher does not come back
            "SHOAL_GPUS": str(workers),
        }
        self.processes = JobWorkers(
            self.executor,
            self.directory / "workers",
            argv,
            {**_user_env(), **own_env, **(env or {})},
            self._exited,
            warm=warm,
        )
        self.service: ControlService | None = None
        self._handle: JobHandle | None = None
        self._port = 0
        self._ended = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="shoal-launch", daemon=True)

    @property
    def handle(self) -> JobHandle:
        assert self._handle is not None, "the job has not started"
        return self._handle

    # Starting and ending

    def __enter__(self) -> LocalJob:
        self._thread.start()
        self._run(self._begin())
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all workers."""
        with contextlib.suppress(TimeoutError):
            self._run(self._end())
        self.executor.close()
        if self._own_zygote is not None:
            self._own_zygote.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        if not self._thread.is_alive():
            self._loop.close()

    def _run(self, work: Coroutine[Any, Any, _T]) -> _T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    def _do(self, act: Callable[[], _T]) -> _T:
        """Call it on the event loop's thread."""

        async def run() -> _T:
            return act()

        return self._run(run())

    async def _begin(self) -> None:
        await self._start_service(None)
        if self._begin_from is not None:
            self.handle.state.checkpoint = os.path.abspath(self._begin_from)
        self.handle.set_target(self.new_workers(self.size))
        if not self._quiet:
            self._printer = asyncio.create_task(self._print_output())

    async def _end(self) -> None:
        self._ended = True  # exits from now on are expected
        await self.processes.end_all()
        await self._close_service()
        rest = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)
        if not self._quiet:
            self.processes.print_output()

    async def _print_output(self) -> None:
        while True:
            self.processes.print_output()
            await asyncio.sleep(OUTPUT_INTERVAL_S)

    async def _start_service(self, restore: dict[str, Any] | None) -> None:
        self.service = ControlService(self.processes, on_event=lambda _, event: self._on_event(event))
        address = await self.service.start("127.0.0.1", self._port)
        self._port = int(address.rpartition(":")[2])
        self._handle = self.service.add(
            "local",
            self.secret,
            restore=restore,
            timing=self._timing,
            pause_path=str(self.directory / "paused.pt"),
            on_request=self.request,
            files=self.directory,
            opens_paths=lambda: True,  # all of it runs under one account, on one machine
        )
        self.processes.env["SHOAL_CONTROL"] = address
        (self.directory / "address").write_text(address)

    async def _close_service(self) -> None:
        if self.service is not None:
            await self.service.close()

    def stop_control(self) -> dict[str, Any]:
        """Drop the control service as if its process had died. Return the state that it would have saved."""
        state = self.handle.state.to_dict()
        self._run(self._close_service())
        return state

    def start_control(self, state: dict[str, Any] | None) -> None:
        """Start another control service at the same address, with or without the saved state."""
        self._run(self._start_service(state))

    def _exited(self, worker: str, why: str, code: int | None) -> None:
        if self._ended:
            return
        if code and self.handle.state.outcome is not None:
            self.failed_after_end = self.failed_after_end or f"{worker} {why}"
        self.handle.exited(worker, why, by_itself=code is not None)

    # Changing the job

    def target(self, workers: list[str]) -> None:
        self._do(lambda: self.handle.set_target(workers))

    def resize(self, size: int) -> None:
        self._do(lambda: self._resize(size))

    def replace(self, *workers: str) -> None:
        """Replace these workers by new ones."""
        self._do(lambda: self._replace(workers))

    def migrate(self) -> None:
        """Replace all workers by new ones."""
        self._do(self._migrate)

    def pause(self) -> None:
        self._do(lambda: self.handle.set_target([]))

    def checkpoint(self) -> None:
        self._do(lambda: self.handle.ask_checkpoint())

    def stop(self) -> None:
        self._do(lambda: self.handle.stop("stopped by its user"))

    def kill(self, worker: str, number: int = signal.SIGKILL) -> None:
        """Send a signal to a worker, for tests of faults."""
        self.processes.signal(worker, number)

    def new_workers(self, count: int) -> list[str]:
        """Ids for new workers. An id is used only once."""
        self._count += count
        return [f"w{i}" for i in range(self._count - count, self._count)]

    def _present(self) -> list[str]:
        state = self.handle.state
        return [view.worker for view in state.alive(state.target)]

    def _resize(self, size: int) -> None:
        if size < 0:
            raise ValueError(f"a job cannot have {size} workers")
        if size % self.handle.state.group:
            group = self.handle.state.group
            raise ValueError(
                f"the model is sharded over groups of {group} workers: give a multiple of {group}"
            )
        present, self.size = self._present(), size
        self.handle.set_target(present[:size] + self.new_workers(max(0, size - len(present))))

    def _replace(self, workers: tuple[str, ...]) -> None:
        present = self._present()
        unknown = [w for w in workers if w not in present]
        if unknown:
            raise ValueError(f"there is no worker {unknown[0]!r}; there are {', '.join(present)}")
        self.handle.set_target([w for w in present if w not in workers] + self.new_workers(len(workers)))

    def _migrate(self) -> None:
        self.handle.set_target(self.new_workers(len(self._present())))

    def request(self, message: Resize | Ask) -> Answer:
        """Carry out a request of the command line."""
        if isinstance(message, Resize):
            group = self.handle.state.group
            if message.workers % group:
                raise ValueError(
                    f"the model is sharded over groups of {group} workers: give a multiple of {group}, not "
                    f"{message.workers}"
                )
            if message.fresh:
                self._migrate()
            elif message.replace:
                self._replace(message.replace)
            else:
                self._resize(message.workers)
            return Answer(True, f"the job shall have {len(self.handle.state.target)} workers")
        match message.what:
            case "status":
                return Answer(True, data=self.summary())
            case "pause":
                self.handle.set_target([])
            case "checkpoint":
                self.handle.ask_checkpoint()
            case "stop":
                self.handle.stop("stopped by its user")
            case _:
                raise ValueError(f"unknown request {message.what!r}")
        return Answer(True, message.what)

    def summary(self) -> dict[str, Any]:
        state = self.handle.state
        reports = self._reports.values()
        return {
            "generation": state.active.number if state.active else 0,
            "workers": [w for w in state.active.members if w not in state.learners()] if state.active else [],
            "pids": self.processes.pids,
            "target": list(state.target),
            "outcome": state.outcome or ("paused" if state.paused else "running"),
            "step": max((r.step for r in reports), default=0),
            "total_steps": max((r.total_steps for r in reports), default=0),
        }

    # Reacting to events

    def _on_event(self, event: ev.JobEvent) -> None:
        with self.changed:
            self.events.append((time.monotonic(), event))
            if isinstance(event, ev.Measured):
                self._reports[event.worker] = event.report
            self.changed.notify_all()
        self._loop.call_soon(self._respond, event)

    def _respond(self, event: ev.JobEvent) -> None:
        if self.handle.state.outcome is not None:
            return
        match event:
            case ev.WorkerLost(was_member=True) | ev.JobStranded() if self._keep_size and self.size:
                self._replace_lost()
            case ev.WorkerLost() if self._keep_size and self.size and self.handle.state.active is None:
                self._replace_lost()  # before the first step, every worker is needed
            case ev.JobStranded(why=why):
                self.handle.stop(why)
            case ev.StragglerFound(worker=worker) if self._replace_stragglers and worker in self._present():
                self._replace((worker,))

    def _replace_lost(self) -> None:
        now_s = time.monotonic()
        self._losses_s = [t for t in self._losses_s if now_s - t < 60.0] + [now_s]
        if len(self._losses_s) > MAX_LOSSES_PER_MINUTE:
            self.handle.stop(f"workers die repeatedly: more than {MAX_LOSSES_PER_MINUTE} in a minute")
        elif len(self._present()) < self.size and not self.handle.state.pausing:
            self._resize(self.size)

    # Waiting

    def wait(
        self, when: Callable[[ev.JobEvent], Any], timeout_s: float = 60.0, since: int = 0
    ) -> ev.JobEvent:
        """Return the first event, from the `since`-th on, for which `when` is true."""
        deadline_s = time.monotonic() + timeout_s
        index = since
        with self.changed:
            while True:
                while index < len(self.events):
                    event = self.events[index][1]
                    if when(event):
                        return event
                    if isinstance(event, ev.JobFailed):
                        raise RuntimeError(f"the job failed: {event}\n{self.logs()}")
                    index += 1
                left_s = deadline_s - time.monotonic()
                if left_s <= 0 or not self.changed.wait(left_s):
                    recent = [e for _, e in self.events if not isinstance(e, ev.Measured)][-8:]
                    raise TimeoutError(f"no such event in {timeout_s} s; so far: {recent}\n{self.logs()}")

    def wait_size(self, size: int, timeout_s: float = 60.0, since: int = 0) -> ev.JobEvent:
        return self.wait(
            lambda e: isinstance(e, ev.GenerationCommitted) and len(e.members) == size, timeout_s, since
        )

    def wait_end(self, timeout_s: float = 120.0) -> ev.JobEvent:
        return self.wait(lambda e: isinstance(e, (ev.JobFinished, ev.JobFailed)), timeout_s)

    def wait_gone(self, timeout_s: float = 600.0) -> None:
        """Wait until all processes have ended by themselves: a script may still evaluate and save."""
        deadline_s = time.monotonic() + timeout_s
        while self.processes.running and time.monotonic() < deadline_s:
            time.sleep(0.05)

    def logs(self) -> str:
        return self.processes.logs()


def _user_env() -> dict[str, str]:
    """The user's environment for the workers, without the variables that tell a worker who it is."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("SHOAL_") or k in SETTINGS}
    env.pop("CUDA_VISIBLE_DEVICES", None)  # each worker gets one device
    return {"OMP_NUM_THREADS": "1", **env}
