"""What is in force, and whether the server is healthy."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Protocol

from shoal import __version__
from shoal.executors.base import Executor, NodeInfo
from shoal.server.api import models as m
from shoal.server.loop.clock import Clock, as_time, warn_of_clock
from shoal.server.loop.devices import Devices
from shoal.server.loop.node_table import NodeTable
from shoal.server.loop.outbox import Outbox
from shoal.server.loop.profiles import Profiles
from shoal.server.loop.sharing.sharing import Sharing
from shoal.server.services.accounts import Accounts
from shoal.server.services.loop_view import LoopView
from shoal.server.services.nodes import Nodes
from shoal.server.store.store import Store

CLOCK_OFF_S = 10.0
LOW_DISK_BYTES = 200 * 1024 * 1024
MOST_WARNINGS = 5


class StatusLoop(LoopView, Protocol):
    """What status and health need of the control loop."""

    @property
    def policy_options(self) -> dict[str, str]: ...

    @property
    def nodes(self) -> Sequence[NodeInfo]: ...

    @property
    def table(self) -> NodeTable: ...

    @property
    def devices(self) -> Devices: ...

    @property
    def executor(self) -> Executor: ...

    @property
    def outbox(self) -> Outbox: ...

    @property
    def sharing(self) -> Sharing: ...

    @property
    def profiles(self) -> Profiles: ...

    @property
    def warnings(self) -> list[str]: ...


@dataclass(slots=True)
class Process:
    """The server as a process. It has no address before it listens."""

    home: Path
    pid: int
    started_s: float
    address: str = ""


class Status:
    def __init__(
        self,
        loop: StatusLoop,
        store: Store,
        nodes: Nodes,
        clock: Clock,
        process: Process,
        upload_limit_bytes: int,
        ignored: Callable[[], list[str]],
        machine_checks: Callable[[], list[m.Check]],
        try_ways: Callable[[], Awaitable[None]],
        accounts: Accounts,
    ) -> None:
        """`ignored`: what somebody has set and the policy in force does not use.

        `machine_checks`: of the machines and of the engine that provides them. `try_ways` prepares what they say of
        the ways between machines.
        """
        self._machine_checks, self._try_ways = machine_checks, try_ways
        self._loop, self._store, self._nodes, self._ignored = loop, store, nodes, ignored
        self._upload_limit_bytes = upload_limit_bytes
        self._clock, self.process, self._accounts = clock, process, accounts

    def show(self, user: str, role: str, only: str | None) -> m.Status:
        """`only`: count the jobs of this user; None: of all."""
        loop, process = self._loop, self.process
        return m.Status(
            version=__version__,
            home=str(process.home),
            pid=process.pid,
            address=process.address,
            started_at=as_time(process.started_s),
            executor=loop.executor.name,
            virtual=self._is_virtual,
            policy=loop.policy_name,
            policy_options=dataclasses.asdict(loop.scheduler.policy.options),
            policy_given=loop.policy_options,
            share=loop.sharing.colocation is not None,
            pre_schedule=loop.sharing.prescheduling is not None,
            store="sqlite" if self._store.kind == "sqlite" else "postgresql",
            nodes=self._nodes.all(),
            total_gpus=loop.table.gpus,
            used_gpus=loop.devices.used,
            jobs=self._store.count_jobs(only),
            user=user,
            role=role,
            warnings=self._warnings(),
            last_event=self._store.last_event()[0],
            upload_limit_bytes=self._upload_limit_bytes,
        )

    @property
    def _is_virtual(self) -> bool:
        return any(n.virtual for n in self._loop.nodes)

    @property
    def _why_virtual(self) -> str:
        return str(getattr(self._loop.executor, "why_virtual", ""))

    def _warnings(self) -> list[str]:
        found = [*self._loop.warnings, *self._ignored()]
        if self._is_virtual:
            why = f" ({self._why_virtual})" if self._why_virtual else ""
            found.append(f"the GPUs are virtual: jobs run on the CPU{why}")
        if self._loop.outbox.trouble:
            found.append(self._loop.outbox.trouble)
        return found

    async def doctor(self) -> m.Doctor:
        """What is in order, what is not, and what to do about it."""
        await self._try_ways()
        checks = [
            self._gpu_check(),
            self._store_check(),
            self._disk_check(),
            self._clock_check(),
            *self._machine_checks(),
            *([] if (found := self._accounts.doctor()) is None else [found]),
            *self._loop_checks(),
            _torch_check(),
        ]
        return m.Doctor(healthy=all(c.status != "error" for c in checks), checks=checks)

    def _gpu_check(self) -> m.Check:
        cluster = self._loop.scheduler.cluster
        total = self._loop.table.gpus
        if not self._is_virtual:
            text = f"{total} GPUs: {', '.join(cluster.gpu_types)}"
            return m.Check(name="gpus", status="ok", message=text)
        why = self._why_virtual or "as was asked for with --gpus"
        hint = "install the NVIDIA driver, or go on with virtual GPUs" if "driver" in why else None
        text = f"{total} virtual GPUs, jobs run on the CPU: {why}"
        return m.Check(name="gpus", status="warning" if hint else "ok", message=text, hint=hint)

    def _store_check(self) -> m.Check:
        trouble = self._loop.outbox.trouble
        if trouble:
            return m.Check(name="store", status="error", message=trouble, hint="it is tried every second")
        size_mb = self._store.size_bytes() / 1e6
        return m.Check(name="store", status="ok", message=f"{self._store.kind}, {size_mb:.1f} MB")

    def _disk_check(self) -> m.Check:
        home = self.process.home
        free = shutil.disk_usage(home).free
        text = f"{free / 2**30:.1f} GiB are free at {home}"
        if free < LOW_DISK_BYTES:
            return m.Check(name="disk", status="warning", message=text, hint="free some space")
        return m.Check(name="disk", status="ok", message=text)

    def _clock_check(self) -> m.Check:
        set_by_s = self._clock.machine_ahead_s()
        if abs(set_by_s) < CLOCK_OFF_S:
            return m.Check(name="clock", status="ok", message="as the machine's")
        warning = warn_of_clock(self._clock)
        if warning is not None:
            text, _, hint = warning.rpartition(": ")
            return m.Check(name="clock", status="warning", message=text, hint=hint)
        text = f"the machine's clock was set by {set_by_s:+.0f} s since the server started"
        hint = (
            "durations are right, times of day are not: `shoal down --keep-jobs` and `shoal up` correct them"
        )
        return m.Check(name="clock", status="warning", message=text, hint=hint)

    def _loop_checks(self) -> list[m.Check]:
        loop = self._loop
        policy, name = loop.scheduler.policy, loop.policy_name
        jobs = f"{len(loop.jobs)} unfinished, {loop.devices.used} GPUs in use"
        found = [
            m.Check(name="policy", status="ok", message=f"{name}: {policy.summary}"),
            m.Check(name="jobs", status="ok", message=jobs),
        ]
        hint = "choose another with `shoal policy set`, or leave it out"
        found += [
            m.Check(name="ignored", status="warning", message=text, hint=hint) for text in self._ignored()
        ]
        if policy.needs_lengths:
            unknown = sum(loop.profiles.remaining(j).unknown is not None for j in loop.jobs.values())
            if unknown:
                text = f"policy {name} needs to know how long jobs take; it assumes a length for {unknown}"
                hint = "give iterations or expected_s, or choose a policy that needs no lengths"
                found.append(m.Check(name="lengths", status="warning", message=text, hint=hint))
        recent = loop.warnings[-MOST_WARNINGS:]
        return found + [m.Check(name="warning", status="warning", message=text) for text in recent]


def _torch_check() -> m.Check:
    try:
        return m.Check(name="torch", status="ok", message=f"torch {version('torch')}")
    except PackageNotFoundError:
        text = "torch is not installed where the server runs: live jobs start without a warm process"
        return m.Check(name="torch", status="warning", message=text, hint="pip install 'shoal[torch]'")
