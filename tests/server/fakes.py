"""A cluster without processes: workers that do nothing, but speak the real protocol, and a server around them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from shoal.executors.base import Exit, GpuUsage, NodeChange, NodeInfo, NodeUp, WorkerSpec
from shoal.server.control import Control
from shoal.server.loop.control_loop import ControlLoop
from shoal.server.options import UPLOAD_LIMIT_BYTES, Options
from shoal.wire import auth
from shoal.wire.auth import ClientProof, Seal
from shoal.wire.member import Build, Effect, Enter, Entries, Interrupt, Member, Quit
from shoal.wire.messages import Hello, Order, Phase, Plan, Report, decode, encode
from shoal.wire.tls import pinned_context

SIGNATURE = ("parameter w float32 [2]",)


class FakeLive:
    """A live worker: the real state machine and the real wire, but its steps are a matter of saying so."""

    def __init__(self, fleet: Fleet, spec: WorkerSpec) -> None:
        self.fleet, self.spec, self.id = fleet, spec, spec.worker
        self.job = spec.env["SHOAL_JOB"]
        self.member = Member(self.id, address=f"at-{self.id}")
        self.alive = True
        self._writer: asyncio.StreamWriter | None = None
        self._out: Seal | None = None
        self.task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        self.member.ready(SIGNATURE, self.member.address)
        while self.alive:
            with contextlib.suppress(OSError, EOFError, asyncio.IncompleteReadError):
                await self._converse()
            await asyncio.sleep(0.02)

    async def _converse(self) -> None:
        file = Path(self.spec.env.get("SHOAL_CONTROL_FILE", "/nonexistent"))
        address = file.read_text().strip() if file.exists() else self.spec.env["SHOAL_CONTROL"]
        host, _, port = address.partition(":")
        tls = pinned_context() if "SHOAL_CONTROL_CERTIFICATE" in self.spec.env else None
        reader, writer = await asyncio.open_connection(host, int(port), ssl=tls)
        try:
            secret = auth.JobKey.parse(self.spec.secret_files["SHOAL_SECRET_FILE"].encode()).secret
            challenge = await reader.readexactly(auth.CHALLENGE_BYTES)
            proof = ClientProof.make(challenge, secret, self.job, "worker")
            writer.write(len(proof.request).to_bytes(2, "big") + proof.request)
            size = int.from_bytes(await reader.readexactly(2), "big")
            keys = proof.check(await reader.readexactly(size))
            self._writer, self._out, inward = writer, Seal(keys.client_to_server), Seal(keys.server_to_client)
            self.member.reconnected()
            self.send(Hello(self.id, 1))
            self.say()
            while self.alive:
                header = await reader.readexactly(Seal.HEADER_BYTES)
                body = await reader.readexactly(Seal.body_bytes(header))
                message = decode(inward.unwrap(header, body))
                assert isinstance(message, Order)
                self.react(self.member.order(message))
                self.say()
        finally:
            self._writer = None
            writer.close()

    def send(self, message: Any) -> None:
        if self._writer is not None and self._out is not None:
            self._writer.write(self._out.wrap(encode(message)))

    def say(self) -> None:
        self.send(self.member.status())

    def react(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Build(plan):
                    self.member.publish(plan.number, self.id, f"address of {self.id}")
                case Entries(number, _):
                    if self.member.formed != number:
                        self.react(self.member.group_formed(number))
                case Enter(plan):
                    self.member.enter(plan)
                    if self.member.partial:
                        self.member.state_complete(0)
                case Interrupt():
                    self.member.halt(False)
                case Quit():
                    self.say()
                    if not self.fleet.lingers:
                        self.fleet.end(self.id, 0)

    def end(self) -> None:
        self.alive = False
        if self._writer is not None:
            self._writer.close()
        self.task.cancel()


class Fleet:
    """An executor in memory. `step` makes live jobs take a step; `end` lets a worker end by itself."""

    name = "fake"

    def __init__(self, nodes: tuple[NodeInfo, ...] | int = 4) -> None:
        if isinstance(nodes, int):
            nodes = (NodeInfo("local", nodes, "virtual", True),)
        self._nodes = nodes
        self.on_exit: Callable[[Exit], None] = lambda exit_: None
        self.on_node: Callable[[NodeChange], None] = lambda change: None
        #: Nodes of an earlier server that have not come back yet.
        self.awaited: tuple[NodeInfo, ...] = ()
        #: Workers that were told to use their GPU.
        self.gone_on: set[str] = set()
        self.running: dict[str, WorkerSpec] = {}
        self.live: dict[str, FakeLive] = {}
        self.suspended: set[str] = set()
        self.started: list[str] = []
        self.told: list[str] = []
        self.warned: list[tuple[str, str]] = []
        #: Workers that do not end when they are told to, until `end` is called.
        self.stubborn = False
        #: Whether a start on a GPU in use fails; checking takes time with thousands of workers.
        self.checks_gpus = True
        #: What must never happen. The server goes on after an error of its executor.
        self.clashes: list[str] = []
        #: How workers ended, for a server that was not there to see it.
        self.exits: dict[str, Exit] = {}
        #: Workers that compute slower than the others, and by how much.
        self.slow: dict[str, float] = {}
        #: Why no worker can be started; None: they can.
        self.broken: str | None = None
        #: Workers that have left their job do not end by themselves.
        self.lingers = False
        #: By job: seconds per step by number of workers; without it, twice the workers take half the time.
        self.curves: dict[int, Callable[[int], float]] = {}
        #: The server has just died: what it wants done is not done any more.
        self.deaf = False
        #: The GPU that the server says a worker uses: one that stood still may use another since it woke.
        self.uses: Callable[[str], tuple[str, int] | None] = lambda worker: None

    def nodes(self) -> tuple[NodeInfo, ...]:
        return self._nodes

    def awaited_nodes(self) -> tuple[NodeInfo, ...]:
        return self.awaited

    def join(self, node: NodeInfo) -> None:
        """A node joins, or comes back."""
        self._nodes = (*(n for n in self._nodes if n.name != node.name), node)
        self.on_node(NodeUp(node))

    def free_port(self, node: str) -> int:
        return 29500

    def go(self, worker: str) -> None:
        if not self.deaf:
            self.gone_on.add(worker)

    def warm_up(self) -> None:
        pass

    def usage(self) -> dict[tuple[str, int], GpuUsage]:
        return {}

    def close(self) -> None:
        for worker in self.live.values():
            worker.end()

    def start(self, worker: WorkerSpec) -> None:
        if self.deaf:
            return
        self._check_gpu_is_free(worker)
        if self.broken is not None:
            exit_ = Exit(worker.worker, None, None, self.broken, began=False)
            asyncio.get_running_loop().call_soon(self.on_exit, exit_)
            return
        self.running[worker.worker] = worker
        self.started.append(worker.worker)
        if "SHOAL_CONTROL" in worker.env:
            self.live[worker.worker] = FakeLive(self, worker)

    def _check_gpu_is_free(self, worker: WorkerSpec) -> None:
        """What must never happen: two workers at work on one GPU."""
        if not self.checks_gpus:
            return
        for other in self.running.values():
            if other.worker not in (worker.worker, *self.suspended) and self.gpu(other) == self.gpu(worker):
                self.clashes.append(f"{worker.worker} on the GPU of {other.worker}")
                raise AssertionError(self.clashes[-1])

    def gpu(self, worker: WorkerSpec) -> tuple[str, int]:
        return self.uses(worker.worker) or (worker.node, worker.gpu)

    def stop(self, worker: str, *, kill: bool = False) -> None:
        if worker in self.running and not self.deaf:
            self.told.append(worker)
            if kill or not self.stubborn:
                asyncio.get_running_loop().call_soon(self._ended, worker, None, "SIGTERM", True)

    def suspend(self, worker: str) -> None:
        if worker in self.running and not self.deaf:
            self.suspended.add(worker)

    def warn(self, worker: str, signal: str) -> None:
        if worker in self.running and not self.deaf:
            self.warned.append((worker, signal))

    def wake(self, worker: str) -> None:
        if worker in self.suspended and not self.deaf:
            self._check_gpu_is_free(self.running[worker])
            self.suspended.discard(worker)

    def adopt(self, worker: str, directory: Path) -> None:
        if worker not in self.running:
            exit_ = self.exits.get(worker) or Exit(worker, None, None, "it never began", began=False)
            asyncio.get_running_loop().call_soon(self.on_exit, exit_)

    def end(self, worker: str, code: int | None = 0, signal: str | None = None) -> None:
        asyncio.get_running_loop().call_soon(self._ended, worker, code, signal, False)

    def _ended(self, worker: str, code: int | None, signal: str | None, told: bool) -> None:
        if self.running.pop(worker, None) is not None:
            self.suspended.discard(worker)
            if worker in self.live:
                self.live.pop(worker).end()
            self.exits[worker] = Exit(worker, code, signal, "", asked_to_end=told)
            self.on_exit(self.exits[worker])

    # Training

    def crew(self, job: int) -> list[FakeLive]:
        return [w for w in self.live.values() if w.job == str(job) and w.alive]

    def step(self, job: int, *, total: int = 1000, seconds: float = 0.1, counted: bool = True) -> None:
        """One step of the job's generation, if all its members are there; a switch happens at its end.

        `counted`: it tells how many steps there are in all.
        """
        by_id = {w.id: w for w in self.crew(job)}
        active = [w for w in by_id.values() if w.member.phase is Phase.ACTIVE and not w.member.partial]
        if not active:
            return
        newest = max(w.member.generation for w in active)
        members = [w for w in active if w.member.generation == newest]
        expected = members[0].member.members
        if len(members) < len(expected):
            if any(m not in by_id for m in expected):
                for worker in members:  # a collective broke
                    worker.member.halt(False)
                    worker.say()
            return
        flags = {w.member.flag() for w in members}
        agreed = len(flags) == 1 and next(iter(flags)) != 0
        done = 0
        curve = self.curves.get(job)
        step_s = curve(len(members)) if curve is not None else seconds / len(members)
        for worker in members:
            if agreed:
                worker.member.agree()
            worker.member.applied()
            done = worker.member.done
            self._boundary(worker, by_id)
            report = Report(
                step=done, total_steps=total if counted else 0, steps=1, seconds=step_s,
                workers=len(members), samples=1.0,
                compute_s=step_s * self.slow.get(worker.id, 1.0), values={"loss": 1.0 / (1 + done)},
            )  # fmt: skip
            worker.send(report)
            if done >= total:
                worker.member.finish()
            worker.say()
        if done >= total:
            for worker in members:
                self.end(worker.id, 0)

    def _boundary(self, worker: FakeLive, by_id: dict[str, FakeLive]) -> None:
        plan: Plan | None = worker.member.boundary()
        if plan is None:
            return
        if worker.id not in plan.members:
            worker.member.saved = plan.save
            worker.say()
            if not self.lingers:
                self.end(worker.id, 0)
        elif worker.id == plan.members[0]:
            for newcomer in plan.newcomers:
                if newcomer in by_id:
                    by_id[newcomer].member.joined(plan, worker.member.done)
                    by_id[newcomer].member.state_complete(worker.member.done)
                    by_id[newcomer].say()


@dataclass
class Here:
    """A server in this process, with a client for each user."""

    control: Control
    fleet: Fleet
    http: httpx.AsyncClient
    tokens: dict[str, str]

    @property
    def loop(self) -> Any:
        return self.control.loop

    async def call(
        self, method: str, path: str, *, user: str | None = "admin", status: int | None = None, **kwargs: Any
    ) -> Any:
        headers = dict(kwargs.pop("headers", {}))
        if user is not None:
            headers["Authorization"] = f"Bearer {self.tokens.get(user, user)}"
        path = path if path.startswith(("/metrics", "/healthz")) else f"/api/v1{path}"
        reply = await self.http.request(method, path, headers=headers, **kwargs)
        if status is not None:
            assert reply.status_code == status, (reply.status_code, reply.text)
        elif reply.status_code >= 400:
            raise AssertionError((reply.status_code, reply.text))
        return reply.json() if reply.content and "json" in reply.headers["content-type"] else reply.text

    async def get(self, path: str, **kwargs: Any) -> Any:
        return await self.call("GET", path, **kwargs)

    async def post(self, path: str, **kwargs: Any) -> Any:
        return await self.call("POST", path, **kwargs)

    async def submit(self, gpus: str = "1", *, user: str = "admin", **spec: Any) -> Any:
        body = {"command": ["train"], "gpus": gpus, "workdir": "/tmp", "per_gpu": True, **spec}
        return await self.post("/jobs", user=user, json=body, status=201)

    async def add_user(self, name: str, role: str = "user", tickets: float = 1.0) -> None:
        await self.post("/users", json={"name": name, "role": role, "tickets": tickets}, status=201)
        made = await self.post("/tokens", json={"user": name}, status=201)
        self.tokens[name] = made["token"]

    async def until(self, what: Callable[[], Any], *, train: tuple[int, ...] = (), turns: int = 4000) -> None:
        """Let things happen until this holds; live jobs in `train` take steps meanwhile."""
        for turn in range(turns):
            if what():
                return
            if turn % 5 == 4:
                for job in train:
                    self.fleet.step(job)
            await asyncio.sleep(0.002)
        jobs = {j.id: (j.life, j.target, j.workers, j.coordinator) for j in self.loop.jobs.values()}
        raise AssertionError(f"it did not come to pass: {jobs}")

    def state(self, job: int) -> str:
        row = self.control.store.job(job)
        assert row is not None
        return str(row["state"])

    def gpus(self, job: int) -> int:
        live = self.loop.jobs.get(job)
        return live.gpus if live is not None else 0

    def check(self) -> None:
        """What must always hold."""
        c = self.loop
        assert not self.fleet.clashes
        c.devices.check()
        assert c.devices.used <= c.cluster.total_gpus
        for job in c.jobs.values():
            held = [w for w in job.workers.values() if w.holds_gpu]
            assert all(c.devices.owner(w.device) == w.id for w in held), job
            reason = self.control.services.reasons.reason(job)
            wish = job.max_gpus if c.scheduler.policy.elastic else job.requested_gpus
            pending = job.life.state.value == "pending"
            assert reason is not None or not pending or job.gpus >= wish, (
                f"{job.name} waits without a reason: {job.life}, ending {job.ending}, {job.gpus} of {job.target_gpus} "
                f"GPUs, workers {job.workers}"
            )


@contextlib.asynccontextmanager
async def server(
    home: Path,
    gpus: int | tuple[NodeInfo, ...] = 4,
    *,
    policy: str | None = "fifo",
    fleet: Fleet | None = None,
    database: str | None = None,
    placement: str = "auto",
    share: bool | None = None,
    pre_schedule: bool | None = None,
    upload_limit_bytes: int = UPLOAD_LIMIT_BYTES,
    webhook_hosts: tuple[str, ...] | None = None,
    idle_after_s: float | None = None,
    idle_action: str | None = None,
    shared: str | None = None,
    kill: bool = False,
    stop_jobs: bool = False,
) -> AsyncIterator[Here]:
    """A server on this home. With `kill` it ends as by kill -9: nothing is saved, nothing is told.

    `stop_jobs`: its jobs end with it and start again with the next one.
    """
    fleet = fleet or Fleet(gpus)
    options = Options(
        home,
        policy=policy,
        placement=placement,
        share=share,
        pre_schedule=pre_schedule,
        database=database,
        upload_limit_bytes=upload_limit_bytes,
        shared=shared,
        webhook_hosts=webhook_hosts,
        idle_after_s=idle_after_s,
        idle_action=idle_action,
    )
    control = Control(options, executor=fleet)
    fleet.uses = lambda worker: gpu_on_record(control.loop, worker)
    control.make_admin()
    await control.loop.start()
    control.notifier.start()
    control.process.address = "http://test"
    transport = httpx.ASGITransport(control.app, raise_app_exceptions=False, client=("203.0.113.9", 1))
    tokens = {"admin": control.home.admin_token.read_text().strip()}
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
        here = Here(control, fleet, http, tokens)
        try:
            yield here
            here.check()
        finally:
            if kill:
                await cut_off(control)
            else:
                control.stop_jobs = stop_jobs
                await control.close()


def gpu_on_record(c: ControlLoop, worker: str) -> tuple[str, int] | None:
    for job in c.jobs.values():
        if worker in job.workers:
            return job.workers[worker].node, job.workers[worker].device[1]
    return None


async def cut_off(control: Control) -> None:
    """As if the process were gone: no more callbacks, connections closed, the lock released, nothing written."""
    c = control.loop
    c.stopping = True
    c.outbox.flush = lambda: False  # type: ignore[method-assign]
    c.executor.on_exit = lambda exit_: None
    c._inbox.close()
    c.reconciler.close()
    c._saver.stop()
    c.usage.close()
    c.endings.close()
    c.idle.close()
    await control.notifier.close()
    service = c.runners["live"].service
    for handle in service.jobs.values():
        handle._run = lambda effects: None  # the dead do not speak any more
    service._secret_of = lambda job, purpose: None  # type: ignore[method-assign] # nor listen
    for runner in dict.fromkeys(c.runners.values()):
        await runner.close()
    for _ in range(5):  # a connection may have been made this moment
        await asyncio.sleep(0)
        for task in list(service.listener.connections):
            task.cancel()
    control.store.close()
    control.home.release()


def run(story: Any) -> None:
    """Run a story, and nothing may be left behind by it."""
    asyncio.run(asyncio.wait_for(story, 200))
