"""The control service: one port, many jobs. The asynchronous shell around `shoal.wire.coordinator`.

    service = ControlService(starter, on_event=...)
    await service.start("127.0.0.1", 0)
    job = service.add("train-7", secret)
    job.set_target(["train-7.0", "train-7.1"])
    async for event in job.events(): ...

The service may die at any time. Training continues, and workers reconnect to a service at the same address whose jobs
were added with `restore=` (the last dictionary given to `on_change`). Without `restore`, the coordinator takes over
what the workers report.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

from shoal.wire import coordinator
from shoal.wire import events as ev
from shoal.wire.auth import Request
from shoal.wire.channel import AsyncChannel
from shoal.wire.events import Effect, Emit, Send, StartWorker, StopWorker
from shoal.wire.job_files import FILES, JobFiles
from shoal.wire.listener import Connection, Listener
from shoal.wire.messages import Answer, Ask, Hello, Message, Report, Resize, Status, WireError
from shoal.wire.previous import PREVIOUS_PROTOCOL
from shoal.wire.state import CoordinatorState, Timing

WORKER, CLIENT = "worker", "client"
"""The purpose of a connection. It is part of the handshake, so that a client cannot pose as a worker."""

TICK_S = 0.5
PLACES, PLACES_OF_WORKER = 32, 4
"""Connections that one job may have at once: so many, and so many more for each of its workers."""


class WorkerStarter(Protocol):
    """Starts and stops worker processes. Both calls return at once. Report ended processes to `JobHandle.exited`."""

    def start(self, job: str, worker: str) -> None: ...

    def stop(self, job: str, worker: str, kill: bool) -> None: ...


class JobHandle:
    """One job of the service."""

    def __init__(
        self,
        service: ControlService,
        state: CoordinatorState,
        secret: bytes,
        on_change: Callable[[dict[str, Any]], bool | None] | None,
        on_request: Callable[[Resize | Ask], Answer] | None,
        files: JobFiles | None,
        was_started: Callable[[str], bool],
    ) -> None:
        #: What the coordinator knows. Read it; only the methods of this class change it.
        self.state = state
        self.secret = secret
        self.on_request = on_request
        self._files = files
        self._service, self._on_change = service, on_change
        self._channels: dict[str, AsyncChannel] = {}
        self._closed: dict[str, asyncio.Event] = {}
        self._queues: list[asyncio.Queue[ev.JobEvent]] = []
        self._was_started = was_started
        self._connections = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._saved: dict[str, Any] | None = None
        #: Effects of a state that could not be saved yet.
        self._effects: list[Effect] = []

    @property
    def job(self) -> str:
        return self.state.job

    def set_target(self, workers: list[str]) -> None:
        """Reconfigure to these workers. An empty list pauses the job. Returns at once; a newer call wins."""
        self._run(coordinator.set_target(self.state, workers, time.monotonic()))

    def ask_checkpoint(self) -> None:
        self._run(coordinator.ask_checkpoint(self.state, time.monotonic()))

    def stop(self, why: str) -> None:
        self._run(coordinator.stop(self.state, why, time.monotonic()))

    def exited(self, worker: str, why: str, *, by_itself: bool = True) -> None:
        """The process of a worker has ended. Returns at once; see `take_in_exit`."""
        task = asyncio.get_running_loop().create_task(self.take_in_exit(worker, why, by_itself=by_itself))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def take_in_exit(self, worker: str, why: str, *, by_itself: bool = True) -> None:
        """Read the messages that the worker sent before its process ended, then tell the coordinator of the end.

        `by_itself`: nothing killed the process.
        """
        if worker in self._closed:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closed[worker].wait(), 1.0)
        self._run(coordinator.exited(self.state, worker, why, time.monotonic(), by_itself=by_itself))

    async def events(self) -> AsyncIterator[ev.JobEvent]:
        queue: asyncio.Queue[ev.JobEvent] = asyncio.Queue()
        self._queues.append(queue)
        try:
            while True:
                yield await queue.get()
        finally:
            self._queues.remove(queue)

    def excuse(self, late_s: float) -> None:
        """This service did not read messages for so long: add it to the workers' time-outs."""
        for view in self.state.workers.values():
            view.heard_s += late_s
            view.back_by_s += late_s

    def await_return(self, workers: Iterable[str], *, can_connect: bool) -> None:
        """These workers could not connect since this service started. Their time to return begins when they can."""
        until_s = time.monotonic() + self.state.timing.restored_s if can_connect else math.inf
        for worker in workers:
            view = self.state.workers.get(worker)
            if view is not None and not view.connected and view.back_by_s:
                view.back_by_s = until_s

    def tick(self) -> None:
        self._run(coordinator.tick(self.state, time.monotonic()))

    def _run(self, effects: list[Effect]) -> None:
        # The new state is saved before any of its effects is carried out. If that fails, the effects wait for the
        # next input, at the latest the next tick.
        self._effects += effects
        if self._on_change is not None:
            state = self.state.to_dict()
            if state != self._saved:
                self._saved = None
                if self._on_change(state) is False:
                    return
                self._saved = state
        effects, self._effects = self._effects, []
        for effect in effects:
            match effect:
                case Send(worker, order):
                    if worker in self._channels:
                        self._channels[worker].send(order)
                case StartWorker(worker):
                    self._service.starter.start(self.job, worker)
                case StopWorker(worker, kill, _):
                    self._service.starter.stop(self.job, worker, kill)
                case Emit(event):
                    self._service.publish(self.job, event)
                    for queue in self._queues:
                        queue.put_nowait(event)

    @contextlib.contextmanager
    def place(self) -> Iterator[None]:
        """For one connection. One job must not use up the files of the process that serves all."""
        most = PLACES + PLACES_OF_WORKER * len(self.state.workers)
        if self._connections >= most:
            raise WireError(f"job {self.job!r} has {most} connections already")
        self._connections += 1
        try:
            yield
        finally:
            self._connections -= 1

    async def _serve_worker(self, channel: AsyncChannel) -> None:
        hello = await channel.receive()
        if not isinstance(hello, Hello):
            raise WireError("expected Hello")
        worker = hello.worker
        if worker not in self.state.workers and not self._was_started(worker):
            raise WireError(f"worker {worker[:100]!r} was never started")
        if worker in self.state.workers and not self.state.workers[worker].alive:
            raise WireError(f"worker {worker!r} has been counted as lost")
        if worker in self._channels:
            self._channels[worker].close()
        closed = self._closed[worker] = asyncio.Event()
        self._channels[worker] = channel
        self._run(coordinator.connected(self.state, worker, time.monotonic()))
        try:
            while True:
                message = await channel.receive()
                if not isinstance(message, (Status, Report)):
                    raise WireError(f"a worker does not send {type(message).__name__}")
                self._run(coordinator.received(self.state, worker, message, time.monotonic()))
        finally:
            closed.set()
            if self._channels.get(worker) is channel:
                del self._channels[worker]
                self._run(coordinator.disconnected(self.state, worker, time.monotonic()))

    async def _serve_files(self, channel: AsyncChannel) -> None:
        if self._files is None:
            raise WireError("this job keeps no files here")
        await self._files.serve(channel, self._is_saved_at)

    def _is_saved_at(self, location: str) -> bool:
        state = self.state
        restore = state.pending.plan.restore if state.pending is not None else None
        return location in (state.paused, state.checkpoint, restore)

    async def _serve_client(self, channel: AsyncChannel) -> None:
        while True:
            message: Message = await channel.receive()
            if not isinstance(message, (Resize, Ask)) or self.on_request is None:
                raise WireError(f"a client does not send {type(message).__name__}")
            try:
                answer = self.on_request(message)
            except ValueError as error:
                answer = Answer(False, str(error))
            channel.send(answer)


class ControlService:
    def __init__(
        self, starter: WorkerStarter, on_event: Callable[[str, ev.JobEvent], None] | None = None
    ) -> None:
        self.starter = starter
        self.jobs: dict[str, JobHandle] = {}
        self.address = ""
        self._on_event = on_event
        self.listener = Listener(lambda job, purpose: self.secret_of(job, purpose), self._converse)
        self._ticker: asyncio.Task[None] | None = None

    async def start(self, host: str = "127.0.0.1", port: int = 0, tls: ssl.SSLContext | None = None) -> str:
        """Listen, inside TLS if a context is given. Return the address for the workers (also in `address`)."""
        bound_host, bound_port = await self.listener.listen(host, port, tls)
        self.address = f"{bound_host}:{bound_port}"
        self._ticker = asyncio.create_task(self._tick())
        return self.address

    async def listen_for_previous(self, host: str, port: int) -> None:
        """Listen on this port, too, for workers that speak the previous protocol."""
        await self.listener.listen(host, port, protocol=PREVIOUS_PROTOCOL)

    def add(
        self,
        job: str,
        secret: bytes,
        *,
        restore: dict[str, Any] | None = None,
        timing: Timing | None = None,
        pause_path: str = "",
        on_change: Callable[[dict[str, Any]], bool | None] | None = None,
        on_request: Callable[[Resize | Ask], Answer] | None = None,
        files: Path | None = None,
        opens_paths: Callable[[], bool] = lambda: False,
        was_started: Callable[[str], bool] = lambda worker: True,
    ) -> JobHandle:
        """Add a job.

        `on_change` gets the coordinator's state before the effects of a change: save the last one. If it returns
        False, the state could not be saved: the effects are not carried out, and it is called again.

        `files` is the directory in which the job's workers may keep files: `job:NAME` in `pause_path`, for example.
        `opens_paths`: whether its workers may read all that this process may read (see `job_files`).
        `was_started`: whether there ever was a worker of this name, which the coordinator's state does not have.
        """
        if job in self.jobs:
            raise ValueError(f"job {job!r} is already here")
        if restore is not None:
            state = CoordinatorState.from_dict(restore, time.monotonic(), timing)
        else:
            state = CoordinatorState(job, pause_path, timing=timing or Timing())
        handle = self.jobs[job] = JobHandle(
            self,
            state,
            secret,
            on_change,
            on_request,
            JobFiles(files, opens_paths) if files is not None else None,
            was_started,
        )
        return handle

    def remove(self, job: str) -> None:
        handle = self.jobs.pop(job)
        for channel in list(handle._channels.values()):
            channel.close()

    def publish(self, job: str, event: ev.JobEvent) -> None:
        if self._on_event is not None:
            self._on_event(job, event)

    async def close(self) -> None:
        """Stop serving. Workers continue to train and look for a service at this address."""
        if self._ticker is not None:
            self._ticker.cancel()
        await self.listener.close()

    async def _tick(self) -> None:
        """Check time-outs. While this service was suspended or starved it read no messages: the workers were not
        silent, so they get that time on top."""
        while True:
            before_s = time.monotonic()
            await asyncio.sleep(TICK_S)
            late_s = time.monotonic() - before_s - TICK_S
            for handle in list(self.jobs.values()):
                if late_s > TICK_S:
                    handle.excuse(late_s)
                handle.tick()

    def secret_of(self, job: str, purpose: str) -> bytes | None:
        handle = self.jobs.get(job)
        return handle.secret if handle is not None and purpose in (WORKER, CLIENT, FILES) else None

    async def _converse(self, made: Connection) -> None:
        await self.serve(made.request, AsyncChannel(made.reader, made.writer, made.keys, made.protocol))

    async def serve(self, request: Request, channel: AsyncChannel) -> None:
        """Serve a connection that has passed the handshake until it ends."""
        handle = self.jobs.get(request.job)
        if handle is None:
            return
        with handle.place():
            if request.purpose == WORKER:
                await handle._serve_worker(channel)
            elif request.purpose == FILES:
                await handle._serve_files(channel)
            else:
                await handle._serve_client(channel)
