"""One server: what it is made of, its beginning and its end."""

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
from shoal.server.api.routes.common import Server
from shoal.server.home import Home
from shoal.server.loop.clock import go_on
from shoal.server.loop.conductor import Conductor
from shoal.server.options import DEFAULT_POLICY, Options, warn_of_address
from shoal.server.services.answers import Answers
from shoal.server.services.history import History
from shoal.server.services.verbs import Verbs
from shoal.server.store.store import Store

log = logging.getLogger("shoal.server")

#: How often is looked whether the home is still there.
HOME_S = 2.0


class Control:
    """One server: what it is made of, and its beginning and end."""

    def __init__(self, options: Options, executor: Executor | None = None, home: Home | None = None) -> None:
        """`home` is held already, if it is given."""
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
            self.conductor = Conductor(
                self.store, self.executor, self.home, self.clock,
                policy=policy, policy_options=policy_options, placement=options.placement, **self._sharing(),
            )  # fmt: skip
        except BaseException:
            self.home.release()
            raise
        self.verbs = Verbs(self.conductor)
        self.gate = Gate(self.store, self.verbs)
        self.hub = Hub()
        self.store.on_events = self.hub.publish
        self.hub.last_id = self.store.last_event()[0]
        self.done = asyncio.Event()
        self.stop_jobs = False
        self._watcher: asyncio.Task[None] | None = None
        self.server = Server(
            self.conductor,
            self.store,
            self.verbs,
            Answers(self.conductor),
            History(self.conductor),
            self.gate,
            self.hub,
            self.home,
            self.clock.now_s(),
            pid=os.getpid(),
            shut_down=self.shut_down,
        )
        self.app = make_app(self.server)

    def _policy(self) -> tuple[str, dict[str, str]]:
        """As given, else as last set, else the default."""
        saved = self.store.get("policy") or {"name": DEFAULT_POLICY, "options": {}}
        if self.options.policy is not None:
            saved = {"name": self.options.policy, "options": self.options.policy_options}
        try:
            make_options(policy_class(saved["name"]), saved["options"])
        except ShoalError as error:
            if self.options.policy is not None:
                raise
            raise ShoalError(
                f"the policy that was set last cannot be used any more: {error}. "
                f"Install it again, or start with another: shoal up --policy {DEFAULT_POLICY}"
            ) from None
        with self.store.change(self.clock.now_s()) as change:
            change.put("policy", saved)
        return saved["name"], saved["options"]

    def _sharing(self) -> dict[str, bool]:
        """Whether GPUs are shared and jobs start early: as given, else as last time, else not."""
        given = {"share": self.options.share, "pre_schedule": self.options.pre_schedule}
        before = self.store.get("sharing") or {}
        found = {k: bool(before.get(k, False)) if v is None else v for k, v in given.items()}
        with self.store.change(self.clock.now_s()) as change:
            change.put("sharing", found)
        return found

    def _executor(self) -> LocalExecutor:
        """As given, else as last time: a restarted server must find its workers on the same GPUs."""
        gpus = self.options.gpus
        if gpus is None and "executor" in (self.store.get("server") or {}):
            gpus = self.store.get("server")["executor"].get("virtual_gpus")
        return LocalExecutor(gpus)

    async def _watch_home(self) -> None:
        """A home that was removed is the end of its server: no one could find it any more, nor its jobs."""
        while self.home.is_held:
            await asyncio.sleep(HOME_S)
        log.error("the home %s is gone: ending, with all jobs", self.home.path)
        self.shut_down(stop_jobs=True)

    def shut_down(self, stop_jobs: bool) -> None:
        self.stop_jobs = self.stop_jobs or stop_jobs
        self.done.set()

    async def start(self, sock: socket.socket) -> None:
        self.gate.first_start(self.home)
        await self.conductor.start()
        self._watcher = asyncio.create_task(self._watch_home())
        bound = sock.getsockname()
        host = f"[{bound[0]}]" if ":" in bound[0] else bound[0]
        self.server.address = f"http://{host}:{bound[1]}"
        virtual = next((n.gpus for n in self.executor.nodes() if n.virtual), None)
        with self.store.change(self.clock.now_s()) as change:
            change.put("server", {"port": bound[1], "executor": {"virtual_gpus": virtual}})
            change.event(
                "server.started", f"version {__version__} with {counted(self.conductor.cluster.total_gpus, 'GPU')}",
                data={"policy": self.conductor.policy_name, "address": self.server.address},
            )  # fmt: skip
        warning = warn_of_address(bound[0])
        if warning is not None:
            self.conductor.warnings.append(warning)
            log.warning(warning)

    async def close(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
        await self.conductor.close(stop_jobs=self.stop_jobs)
        with contextlib.suppress(ShoalError), self.store.change(self.clock.now_s()) as change:
            jobs = "jobs were stopped" if self.stop_jobs else "jobs run on"
            change.event("server.stopped", f"ended as asked; {jobs}")
        self.hub.close()
        self.executor.close()
        self.store.close()
        self.home.release()
