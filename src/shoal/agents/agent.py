"""The agent: runs the workers of one machine for a control plane that may be elsewhere.

It opens one connection to the control plane and opens it again whenever it breaks. Workers go on meanwhile: each has a
keeper of its own. A worker's files are in `STATE/workers/ID`; the agent finds its workers there after a restart.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import random
import secrets
import shutil
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from shoal.agents import agent_state as st
from shoal.agents.link import Link
from shoal.agents.log_files import read_output
from shoal.agents.ports import PortStock
from shoal.agents.prepared import PreparingExecutor
from shoal.agents.requests import AgentRequests
from shoal.agents.sessions import AgentSessions, OpenSession
from shoal.executors.base import Executor, Exit, NamedAccount, NodeInfo, OwnAccount, WorkerSpec
from shoal.executors.keeper import boot_clock_s as lease_clock_s
from shoal.executors.keeper_files import stamps_ahead_s
from shoal.executors.logs import end_position
from shoal.wire import agent_messages as am
from shoal.wire.atomic_file import write_atomically
from shoal.wire.auth import AuthError
from shoal.wire.messages import WireError
from shoal.wire.tls import FingerprintError

log = logging.getLogger("shoal.agents")

LOG_INTERVAL_S = 0.2
USAGE_INTERVAL_S = 10.0
RETRY_S, LONGEST_RETRY_S = 0.2, 5.0
#: Factor by which the delay between attempts grows. A server that restarts is away for some seconds.
SLOWER = 1.5
SILENT_HEARTBEATS = 4
"""The control plane answers each heartbeat. After so many without an answer the agent connects again."""


class AgentError(Exception):
    """The agent cannot work: the message says what to do."""


Connect = Callable[[], Awaitable[Link]]


def lease_path(state_directory: Path) -> Path:
    return state_directory / "lease"


def node_facts(
    agent: str, nodes: tuple[NodeInfo, ...], address: str, gpu_type: str | None, rack: str, domain: str
) -> dict[str, am.NodeFacts]:
    """What the agent offers, by the executor's name of the node."""
    return {
        info.name: am.NodeFacts(
            name=agent if len(nodes) == 1 else f"{agent}-{info.gpu_type}",
            gpus=info.gpus,
            gpu_type=gpu_type if gpu_type is not None and len(nodes) == 1 else info.gpu_type,
            virtual=info.virtual,
            devices=info.devices,
            rack=rack,
            domain=domain,
            gpu_memory_mb=info.gpu_memory_mb,
            address=address,
        )
        for info in nodes
    }


class Agent:
    """`executor` must use `lease_path(state_directory)` as its lease file, unless the agent is embedded.

    An embedded agent is part of the control plane's process. Its workers use the directories of the control plane, so
    their output is not sent.
    """

    def __init__(
        self,
        name: str,
        state_directory: Path,
        executor: Executor,
        nodes: dict[str, am.NodeFacts],
        connect: Connect,
        *,
        versions: dict[str, str] | None = None,
        embedded: bool = False,
        save_credential: Callable[[str], None] = lambda credential: None,
        open_session: OpenSession | None = None,
        bind: str = "",
    ) -> None:
        """`bind`: what workers listen on, if not on the address of their node."""
        self._directory, self._connect = state_directory, connect
        self._workers = state_directory / "workers"
        self._workers.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock = _lock(state_directory)
        self._requests = AgentRequests(
            state_directory,
            self._send,
            bind or next((facts.address for facts in nodes.values()), "127.0.0.1"),
        )
        self._sessions = AgentSessions(open_session, self._send)
        self._executor = PreparingExecutor(executor, self._requests.workdir)
        self._local_name = {facts.name: local for local, facts in nodes.items()}
        self._address = {facts.name: facts.address for facts in nodes.values()}
        self._listens_at = {"SHOAL_BIND": bind} if bind else {}
        self._embedded, self._save_credential = embedded, save_credential
        self._link: Link | None = None
        self._said = ""
        self._ports = PortStock()
        self.state = st.AgentState(name, secrets.token_hex(8), tuple(nodes.values()), versions=versions or {})

    async def run(self) -> None:
        """Serve until cancelled. Raise AgentError if the control plane refuses this agent for good."""
        self._executor.on_exit = self._exited
        for path in sorted(self._workers.iterdir()):
            self.state.found(path.name)
            self._executor.adopt(path.name, path)
        retry_s = RETRY_S
        try:
            while True:
                try:
                    link = await self._connect()
                    if await self._serve(link):
                        retry_s = RETRY_S
                except FingerprintError as error:
                    raise AgentError(str(error)) from None
                except AuthError as error:
                    self._say(logging.WARNING, str(error))
                except (OSError, EOFError, WireError) as error:
                    self._say(logging.INFO, f"no connection to the control plane: {error or 'it closed'}")
                await asyncio.sleep(retry_s * random.uniform(0.5, 1.0))
                retry_s = min(SLOWER * retry_s, LONGEST_RETRY_S)
        finally:
            self._ports.close()
            self._requests.close()
            self._executor.close()
            os.close(self._lock)

    def _say(self, level: int, text: str) -> None:
        """Each message once, not at every attempt."""
        if text != self._said:
            self._said = text
            log.log(level, "%s; trying again", text)

    def leaving(self, in_s: float, why: str) -> None:
        """The machine will be taken away in `in_s` seconds."""
        self._obey(self.state.leaving(in_s, why, lease_clock_s()))

    def say_goodbye(self) -> None:
        """A person ends this agent. Without workers nobody has to wait until its lease ends."""
        if not self.state.workers:
            self.leaving(0.0, "its agent was ended")

    async def _serve(self, link: Link) -> bool:
        """Serve one connection until it breaks. Return whether the control plane accepted the agent."""
        tasks: list[asyncio.Task[None]] = []
        try:
            self._link = link
            self.state.credential = link.credential
            link.send(self.state.connected(lease_clock_s(), time.time()))
            while True:
                silence_s = SILENT_HEARTBEATS * self.state.heartbeat_s
                async with asyncio.timeout(silence_s):
                    message = await link.receive()
                if isinstance(message, am.TreePart | am.Probe | am.Listen | am.Reach):
                    self._requests.received(message)
                    continue
                if isinstance(message, am.ToSession):
                    self._sessions.received(message)
                    continue
                self._obey(self.state.received(message, lease_clock_s()))
                if isinstance(message, am.Refused):
                    return False
                if not tasks:
                    self._said = ""
                    log.info("connected as %s", self.state.agent)
                    self._obey(self.state.ports(self._ports.fill()))
                    self._requests.connected()
                    loops = [self._renew_loop(), self._usage_loop()]
                    if not self._embedded:
                        loops.append(self._log_loop())
                    tasks = [asyncio.create_task(loop) for loop in loops]
        except (OSError, EOFError, TimeoutError, WireError) as error:
            log.info("lost the control plane: %s", str(error) or type(error).__name__)
            return bool(tasks)
        finally:
            for task in tasks:
                task.cancel()
            self.state.disconnected()
            self._sessions.disconnected()
            self._link = None
            link.close()

    async def _renew_loop(self) -> None:
        while True:
            await asyncio.sleep(self.state.heartbeat_s)
            self._obey(self.state.renew(lease_clock_s(), time.time()))

    async def _log_loop(self) -> None:
        while True:
            if not self._send_output():
                await asyncio.sleep(LOG_INTERVAL_S)
            await asyncio.sleep(0)

    def _send_output(self) -> bool:
        """Send some output. Return whether there was any."""
        found = False
        for read in self.state.log_reads():
            path = self._workers / read.worker
            position, data = read_output(path, read.begin, read.max_bytes)
            exited = self.state.workers[read.worker].exited
            if not data and exited is not None:
                position = exited.log_end  # its last line has no end, or its files were deleted
            effects = self.state.log_read(read, position, data, stamps_ahead_s(path) if data else 0.0)
            self._obey(effects)
            found = found or bool(effects)
        return found

    async def _usage_loop(self) -> None:
        names = {local: name for name, local in self._local_name.items()}
        while True:
            usage = await asyncio.to_thread(self._executor.usage)
            gpus = tuple(
                am.Usage(names[node], gpu, found.utilisation, found.memory_mb)
                for (node, gpu), found in usage.items()
            )
            self._obey(self.state.usage(gpus))
            await asyncio.sleep(USAGE_INTERVAL_S)

    # Effects

    def _send(self, message: am.FromAgent) -> None:
        if self._link is not None:
            self._link.send(message)

    def _obey(self, effects: list[st.Effect]) -> None:
        for effect in effects:
            if isinstance(effect, st.Send):
                self._send(effect.message)
            elif isinstance(effect, st.Do):
                self._carry_out(effect.order)
            elif isinstance(effect, st.SetLease):
                # Without fsync, each few seconds: a machine that starts again has another lease clock.
                write_atomically(lease_path(self._directory), str(effect.until_s), 0o644, durable=False)
            elif isinstance(effect, st.SaveCredential):
                self._save_credential(effect.credential)
            elif effect.final:
                raise AgentError(effect.why)
            else:
                self._say(logging.WARNING, f"the control plane refuses this agent: {effect.why}")

    def _carry_out(self, order: am.Order) -> None:
        if isinstance(order, am.Start):
            self._start(order)
        elif isinstance(order, am.Stop):
            self._executor.stop(order.worker, kill=order.kill)
        elif isinstance(order, am.Suspend):
            self._executor.suspend(order.worker)
        elif isinstance(order, am.Wake):
            self._executor.wake(order.worker)
        elif isinstance(order, am.Warn):
            self._executor.warn(order.worker, order.signal)
        elif isinstance(order, am.Go):
            self._executor.go(order.worker)
        elif isinstance(order, am.WarmUp):
            self._executor.warm_up()
        else:
            self._forget(order.worker)

    def _start(self, order: am.Start) -> None:
        try:
            self._start_worker(order)
        except Exception as error:  # whatever it is: the others go on, and this one ends
            if not isinstance(error, OSError):
                log.exception("worker %s was not started", order.worker)
            why = f"cannot start it: {getattr(error, 'strerror', None) or error}"
            asyncio.get_running_loop().call_soon(
                self._exited, Exit(order.worker, None, None, why, began=False)
            )

    def _start_worker(self, order: am.Start) -> None:
        """The worker's directory is made first: after a restart the agent knows every worker it was told to start."""
        path = self._workers / order.worker
        if order.node not in self._local_name:
            raise OSError(f"this agent has no node {order.node}")
        if self._embedded:
            path.symlink_to(order.directory, target_is_directory=True)
        else:
            path.mkdir(mode=0o700)
        if order.port is not None:
            self._obey(self.state.ports(self._ports.release(order.port)))
        self._executor.start(
            WorkerSpec(
                worker=order.worker,
                directory=path,
                node=self._local_name[order.node],
                gpu=order.gpu,
                command=order.command,
                workdir=order.workdir,
                env={"SHOAL_HOST": self._address[order.node], "SHOAL_NODE": order.node}
                | self._listens_at
                | order.env,
                grace_s=order.grace_s,
                warm=order.warm,
                gpus=order.gpus,
                secret_files=order.secret_files,
                waits_for_go=order.waits_for_go,
                port=order.port,
                tree=order.tree,
                account=NamedAccount(order.account)
                if order.account
                else OwnAccount(order.may_be_root, order.shared),
            )
        )

    def _forget(self, worker: str) -> None:
        path = self._workers / worker
        with contextlib.suppress(FileNotFoundError):
            if path.is_symlink():
                path.unlink()
            else:
                shutil.rmtree(path)

    def _exited(self, exit_: Exit) -> None:
        log_end = 0 if self._embedded else end_position(self._workers / exit_.worker)
        exited = am.Exited(
            worker=exit_.worker,
            code=exit_.code,
            signal=exit_.signal,
            why=exit_.why,
            began=exit_.began,
            told=exit_.asked_to_end,
            ago_s=exit_.ago_s,
            log_end=log_end,
            node_lost=exit_.node_lost,
        )
        self._obey(self.state.exited(exited, lease_clock_s()))


def _lock(directory: Path) -> int:
    """Only one agent at a time uses a state directory."""
    lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise AgentError(f"another agent uses {directory}") from None
    return lock
