"""One server: its parts, its start and its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket

from shoal import __version__
from shoal.core.errors import ShoalError
from shoal.core.options import make_options
from shoal.core.words import counted
from shoal.executors.base import Executor
from shoal.executors.local import LocalExecutor
from shoal.policies.registry import policy_class
from shoal.server.api.app import make_app
from shoal.server.api.auth import Gate
from shoal.server.api.hub import Hub
from shoal.server.api.models import Role
from shoal.server.api.routes.common import Services
from shoal.server.gauges import Gauges
from shoal.server.home import Home, write_atomically
from shoal.server.loop.clock import go_on
from shoal.server.loop.control_loop import ControlLoop
from shoal.server.options import DEFAULT_POLICY, Options, warn_of_address
from shoal.server.services.change import ChangeJob
from shoal.server.services.events import Events
from shoal.server.services.history import History
from shoal.server.services.job_logs import Logs
from shoal.server.services.jobs import Jobs
from shoal.server.services.nodes import Nodes
from shoal.server.services.policy import PolicyInForce
from shoal.server.services.reasons import Reasons
from shoal.server.services.shares import Shares
from shoal.server.services.status import Process, Status
from shoal.server.services.submit import Submit
from shoal.server.services.tokens import Tokens
from shoal.server.services.users import Users
from shoal.server.services.what_if import WhatIf
from shoal.server.services.why import Why
from shoal.server.store.store import Store

log = logging.getLogger("shoal.server")

ADMIN = "admin"
#: Interval between checks that the home directory exists.
HOME_S = 2.0


class Control:
    """Makes all parts of a server. `start` and `close` are its lifetime."""

    def __init__(self, options: Options, executor: Executor | None = None, home: Home | None = None) -> None:
        """A `home` that is given is already locked by this process."""
        self.options = options
        if home is None:
            home = Home(options.home)
            home.take()
        self.home = home
        try:
            url = options.database or f"sqlite:///{self.home.database}"
            self.store = Store(url, where=str(options.home))
            self.clock = go_on(self.store)
            policy, policy_options = self._policy()
            self.executor = executor or self._executor()
            self.loop = ControlLoop(
                self.store, self.executor, self.home, self.clock,
                policy=policy, policy_options=policy_options, placement=options.placement, **self._sharing(),
            )  # fmt: skip
        except BaseException:
            self.home.release()
            raise
        self.hub = Hub()
        self.store.on_events = self.hub.publish
        self.hub.last_id = self.store.last_event()[0]
        self.done = asyncio.Event()
        self.stop_jobs = False
        self._watcher: asyncio.Task[None] | None = None
        self.process = Process(self.home.path, os.getpid(), self.clock.now_s())
        self.services = self._make_services()
        self.app = make_app(self.services)

    def _make_services(self) -> Services:
        """Give each service the parts of the control loop that it needs."""
        loop, store, now_s = self.loop, self.store, self.clock.now_s
        profiles, searches, sharing = loop.profiles, loop.searches, loop.sharing
        reasons = Reasons(loop, profiles, sharing.explanations)
        what_if = WhatIf(loop, profiles)
        shares = Shares(loop, loop.live_ledger)
        nodes = Nodes(loop, store)
        return Services(
            gate=Gate(store, now_s),
            hub=self.hub,
            metrics=loop.metrics,
            gauges=Gauges(loop, store, shares, reasons, lambda: self.hub.last_id),
            jobs=Jobs(loop, store, profiles, reasons, loop.worker_directory),
            logs=Logs(store, loop.worker_directory),
            events=Events(store, lambda: self.hub.last_id),
            submit=Submit(loop, store, self.home, profiles, searches, learns_needs=lambda: sharing.on),
            change=ChangeJob(loop, store, profiles, searches),
            reasons=reasons,
            why=Why(loop, profiles, sharing.explanations, reasons, what_if),
            what_if=what_if,
            history=History(loop, store),
            shares=shares,
            policy=PolicyInForce(loop, store),
            nodes=nodes,
            users=Users(store, now_s, loop.jobs, loop.post),
            tokens=Tokens(store, now_s),
            status=Status(loop, store, nodes, self.clock, self.process),
            shut_down=self.shut_down,
        )

    def make_admin(self) -> None:
        """Make the first admin and its token, unless they exist. Only the owner of the home may read the token."""
        if self.store.user(ADMIN) is None:
            self.services.users.add(ADMIN, Role.ADMIN, 1.0, "system")
        if not self.home.admin_token.exists():
            _, token = self.services.tokens.add(ADMIN, "made at the first start", None, "system")
            write_atomically(self.home.admin_token, token + "\n")

    def _policy(self) -> tuple[str, dict[str, str]]:
        """The policy given, else the one set last, else the default."""
        saved = self.store.get("policy") or {"name": DEFAULT_POLICY, "options": {}}
        if self.options.policy is not None:
            saved = {"name": self.options.policy, "options": self.options.policy_options}
        try:
            make_options(policy_class(saved["name"]), saved["options"])
        except ShoalError as error:
            if self.options.policy is not None:
                raise
            raise ShoalError(
                f"the policy that was set last cannot be used: {error}. "
                f"Install it again, or start with another: shoal up --policy {DEFAULT_POLICY}"
            ) from None
        with self.store.change(self.clock.now_s()) as change:
            change.put("policy", saved)
        return saved["name"], saved["options"]

    def _sharing(self) -> dict[str, bool]:
        """Whether GPUs are shared and jobs pre-scheduled: as given, else as at the last start, else not."""
        given = {"share": self.options.share, "pre_schedule": self.options.pre_schedule}
        before = self.store.get("sharing") or {}
        found = {k: bool(before.get(k, False)) if v is None else v for k, v in given.items()}
        with self.store.change(self.clock.now_s()) as change:
            change.put("sharing", found)
        return found

    def _executor(self) -> LocalExecutor:
        """GPUs as given, else as at the last start: a restarted server must find its workers on the same GPUs."""
        gpus = self.options.gpus
        if gpus is None and "executor" in (self.store.get("server") or {}):
            gpus = self.store.get("server")["executor"].get("virtual_gpus")
        return LocalExecutor(gpus)

    async def _watch_home(self) -> None:
        """End the server when its home is removed: nobody could find it or its jobs any more."""
        while self.home.is_held:
            await asyncio.sleep(HOME_S)
        log.error("the home %s is gone: ending the server and all jobs", self.home.path)
        self.shut_down(stop_jobs=True)

    def shut_down(self, stop_jobs: bool) -> None:
        self.stop_jobs = self.stop_jobs or stop_jobs
        self.done.set()

    async def start(self, sock: socket.socket) -> None:
        self.make_admin()
        await self.loop.start()
        self._watcher = asyncio.create_task(self._watch_home())
        bound = sock.getsockname()
        host = f"[{bound[0]}]" if ":" in bound[0] else bound[0]
        self.process.address = f"http://{host}:{bound[1]}"
        virtual = next((n.gpus for n in self.executor.nodes() if n.virtual), None)
        with self.store.change(self.clock.now_s()) as change:
            change.put("server", {"port": bound[1], "executor": {"virtual_gpus": virtual}})
            change.event(
                "server.started", f"version {__version__} with {counted(self.loop.cluster.total_gpus, 'GPU')}",
                data={"policy": self.loop.policy_name, "address": self.process.address},
            )  # fmt: skip
        warning = warn_of_address(bound[0])
        if warning is not None:
            self.loop.warnings.append(warning)
            log.warning(warning)

    async def close(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
        await self.loop.close(stop_jobs=self.stop_jobs)
        with contextlib.suppress(ShoalError), self.store.change(self.clock.now_s()) as change:
            jobs = "jobs were stopped" if self.stop_jobs else "jobs run on"
            change.event("server.stopped", f"ended as asked; {jobs}")
        self.hub.close()
        self.executor.close()
        self.store.close()
        self.home.release()
