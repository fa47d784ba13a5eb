"""Run a server in the foreground: `python -m shoal.server.serve --home DIR [--gpus N] [--policy P]`.

`shoal up` starts this in the background. It may be killed at any moment and started again on the same home.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ipaddress
import logging
import os
import signal
import socket
import sys
from dataclasses import dataclass, field
from pathlib import Path

import uvicorn

from shoal import __version__
from shoal.core.errors import ShoalError
from shoal.executors.base import Executor
from shoal.executors.local import LocalExecutor
from shoal.policies.base import make_options
from shoal.policies.registry import policy_class
from shoal.server.answers import Answers
from shoal.server.app import make_app
from shoal.server.auth import Gate
from shoal.server.clock import Clock
from shoal.server.conductor import Conductor
from shoal.server.home import Home, default_home
from shoal.server.hub import Hub
from shoal.server.routes.common import Server
from shoal.server.store import Store
from shoal.server.verbs import Verbs

log = logging.getLogger("shoal.server")
DEFAULT_POLICY = "afs-l"
MAX_CONNECTIONS = 2000


class PortInUse(ShoalError):
    exit_code = 9


@dataclass(slots=True)
class Options:
    home: Path
    gpus: int | None = None
    policy: str | None = None
    policy_options: dict[str, str] = field(default_factory=dict)
    host: str = "127.0.0.1"
    port: int = 0
    database: str | None = None


def parse(argv: list[str]) -> Options:
    parser = argparse.ArgumentParser(prog="shoal.server.serve", description="Run a Shoal server.")
    parser.add_argument("--home", type=Path, default=None, help="where all its state is kept")
    parser.add_argument("--gpus", type=int, help="this many virtual GPUs, instead of the real ones")
    parser.add_argument("--policy", help=f"{DEFAULT_POLICY} at the first start, then what was set last")
    parser.add_argument("--policy-option", action="append", default=[], metavar="K=V")
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen at")
    parser.add_argument("--port", type=int, default=0, help="0: any that is free, the same as last time")
    parser.add_argument("--database", help="a PostgreSQL URL, instead of a file in the home")
    given = parser.parse_args(argv)
    if given.gpus is not None and not 1 <= given.gpus <= 100_000:
        parser.error("--gpus must be between 1 and 100000")
    if not 0 <= given.port <= 65535:
        parser.error("--port must be between 0 and 65535")
    options = {}
    for pair in given.policy_option:
        key, eq, value = pair.partition("=")
        if not eq:
            parser.error(f"--policy-option {pair!r} is not of the form KEY=VALUE")
        options[key] = value
    return Options(
        (given.home or default_home()).absolute(),
        given.gpus,
        given.policy,
        options,
        given.host,
        given.port,
        given.database,
    )


def bind(host: str, port: int, preferred: int | None) -> socket.socket:
    """A listening socket: at the given port, else at the one used last, else at any that is free."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for candidate in [port] if port else [preferred or 0, 0]:
        sock = socket.socket(family)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, candidate))
        except OSError as error:
            sock.close()
            if candidate and not port:
                continue
            raise PortInUse(
                f"cannot listen at {host} port {candidate}: {error.strerror}; choose another --port"
            ) from None
        sock.listen(1024)
        sock.setblocking(False)
        return sock
    raise AssertionError


def warn_of_address(host: str) -> str | None:
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(host).is_loopback:
            return None
    if host == "localhost":
        return None
    return f"listening at {host} without TLS: tokens travel in the clear; put a TLS proxy in front"


class Control:
    """One server: what it is made of, and its beginning and end."""

    def __init__(self, options: Options, executor: Executor | None = None) -> None:
        self.options = options
        self.home = Home(options.home)
        self.home.take()
        try:
            url = options.database or f"sqlite:///{self.home.database}"
            self.store = Store(url, where=str(options.home))
            self.clock = Clock(self.store.last_event()[1])
            policy, policy_options = self._policy()
            self.executor = executor or self._executor()
            self.conductor = Conductor(
                self.store, self.executor, self.home, self.clock, policy=policy, policy_options=policy_options
            )
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
        self.server = Server(
            self.conductor,
            self.store,
            self.verbs,
            Answers(self.conductor),
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
        make_options(policy_class(saved["name"]), saved["options"])
        with self.store.change(self.clock.now_s()) as change:
            change.put("policy", saved)
        return saved["name"], saved["options"]

    def _executor(self) -> LocalExecutor:
        """As given, else as last time: a restarted server must find its workers on the same GPUs."""
        gpus = self.options.gpus
        if gpus is None and "executor" in (self.store.get("server") or {}):
            gpus = self.store.get("server")["executor"].get("virtual_gpus")
        return LocalExecutor(gpus)

    def shut_down(self, stop_jobs: bool) -> None:
        self.stop_jobs = self.stop_jobs or stop_jobs
        self.done.set()

    async def start(self, sock: socket.socket) -> None:
        self.gate.first_start(self.home)
        await self.conductor.start()
        bound = sock.getsockname()
        host = f"[{bound[0]}]" if ":" in bound[0] else bound[0]
        self.server.address = f"http://{host}:{bound[1]}"
        virtual = next((n.gpus for n in self.executor.nodes() if n.virtual), None)
        with self.store.change(self.clock.now_s()) as change:
            change.put("server", {"port": bound[1], "executor": {"virtual_gpus": virtual}})
            change.event(
                "server.started", f"version {__version__} with {self.conductor.cluster.total_gpus} GPUs",
                data={"policy": self.conductor.policy_name, "address": self.server.address},
            )  # fmt: skip
        warning = warn_of_address(bound[0])
        if warning is not None:
            self.conductor.warnings.append(warning)
            log.warning(warning)

    async def close(self) -> None:
        await self.conductor.close(stop_jobs=self.stop_jobs)
        with contextlib.suppress(ShoalError), self.store.change(self.clock.now_s()) as change:
            jobs = "jobs were stopped" if self.stop_jobs else "jobs run on"
            change.event("server.stopped", f"ended as asked; {jobs}")
        self.hub.close()
        self.executor.close()
        self.store.close()
        self.home.release()


async def serve(options: Options) -> None:
    control = Control(options)
    try:
        preferred = (control.store.get("server") or {}).get("port")
        sock = bind(options.host, options.port, preferred)
    except BaseException:
        control.home.release()
        raise
    await control.start(sock)
    config = uvicorn.Config(
        control.app,
        log_config=None,
        access_log=False,
        limit_concurrency=MAX_CONNECTIONS,
        timeout_keep_alive=30,
        lifespan="off",
        server_header=False,
    )
    server = uvicorn.Server(config)
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, control.shut_down, False)
    task = asyncio.create_task(server._serve([sock]))
    while not server.started and not task.done():
        await asyncio.sleep(0.01)
    control.home.announce(control.server.address, __version__)
    log.info("listening at %s", control.server.address)
    control.executor.warm_up()
    await asyncio.wait([task, asyncio.create_task(control.done.wait())], return_when=asyncio.FIRST_COMPLETED)
    await control.close()
    server.should_exit = True
    server.force_exit = True
    with contextlib.suppress(asyncio.CancelledError, asyncio.TimeoutError):
        await asyncio.wait_for(task, 5)


def main(argv: list[str] | None = None) -> int:
    options = parse(sys.argv[1:] if argv is None else argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("alembic").setLevel(logging.WARNING)
    try:
        asyncio.run(serve(options))
    except ShoalError as error:
        print(f"shoal: {' '.join(str(error).split())}", file=sys.stderr)
        return int(getattr(error, "exit_code", 2))
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
