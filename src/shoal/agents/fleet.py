"""The control plane's executor for workers on machines with agents: the asynchronous shell around `fleet_state`.

executor = AgentExecutor(AgentRegistry(home / "agents.json"), on_node=...)
executor.adopt(...)                       # workers of an earlier process, before the first agent connects
await executor.listen("127.0.0.1", 0, server_context(...))
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import ssl
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from shoal.agents import fleet_state as fs
from shoal.agents.join_tokens import TokenError, hash_secret, new_secret
from shoal.agents.link import AGENT, JOIN, Link, StreamLink
from shoal.agents.log_files import LogCopy
from shoal.agents.registry import AgentRegistry, KnownAgent
from shoal.executors.base import Exit, GpuUsage, NodeInfo, WorkerSpec
from shoal.executors.logs import Line, end_position, read_lines, tail_position
from shoal.wire import agent_messages as am
from shoal.wire.auth import AuthError
from shoal.wire.channel import HANDSHAKE_TIMEOUT_S, MAX_STRANGERS
from shoal.wire.messages import WireError

log = logging.getLogger("shoal.agents")

TICK_S = 0.5
EMBEDDED = "embedded"
"""The instance of the agent in the control plane's own process."""


class AgentExecutor:
    """Implements `shoal.executors.base.Executor` over all agents.

    Of each worker it keeps the name of its node and a copy of its output in the directory that `start` names.
    """

    name = "agents"

    def __init__(
        self,
        registry: AgentRegistry,
        *,
        timing: fs.Timing | None = None,
        on_node: Callable[[fs.NodeChange], None] = lambda change: None,
        log_copy: LogCopy | None = None,
    ) -> None:
        timing = timing or fs.Timing()
        earlier_s = registry.raise_longest_lease(timing.lease_s)
        timing = fs.Timing(
            timing.lease_s, timing.heartbeat_s, timing.silence_s, timing.keeper_margin_s, earlier_s
        )
        self.on_exit: Callable[[Exit], None] = lambda exit_: None
        self.on_node = on_node
        self.state = fs.FleetState(secrets.token_hex(8), timing)
        self._registry, self._log_copy = registry, log_copy or LogCopy()
        self._directories: dict[str, Path] = {}
        self._links: dict[str, Link] = {}
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._ticker: asyncio.Task[None] | None = None
        self._strangers = 0
        for agent, known in registry.agents.items():
            self.state.restore(agent, known.secret_hash, known.nodes, time.monotonic(), leased=known.leased)

    # The executor

    def nodes(self) -> tuple[NodeInfo, ...]:
        """The nodes of connected agents."""
        return tuple(
            _node_info(node)
            for agent in self.state.agents.values()
            if agent.link is fs.Link.CONNECTED
            for node in agent.nodes
        )

    def start(self, worker: WorkerSpec) -> None:
        if not am.is_worker_id(worker.worker):
            raise ValueError(f"{worker.worker!r} is not an id of a worker")
        try:
            worker.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            (worker.directory / "node").write_text(worker.node)
        except OSError as error:
            why = f"cannot start it: {error.strerror or error}"
            self._obey([fs.WorkerExit(am.Exited(worker.worker, why=why, began=False))])
            return
        self._directories[worker.worker] = worker.directory
        order = am.Start(
            worker=worker.worker,
            node=worker.node,
            gpu=worker.gpu,
            command=worker.command,
            workdir=worker.workdir,
            env=worker.env,
            directory=str(worker.directory),
            grace_s=worker.grace_s,
            warm=worker.warm,
        )
        self._obey(self.state.start(order))

    def stop(self, worker: str, *, kill: bool = False) -> None:
        self._obey(self.state.order(am.Stop(worker, kill)))

    def suspend(self, worker: str) -> None:
        self._obey(self.state.order(am.Suspend(worker)))

    def wake(self, worker: str) -> None:
        self._obey(self.state.order(am.Wake(worker)))

    def adopt(self, worker: str, directory: Path) -> None:
        """Take over a worker that an earlier process started. Call it before `listen`."""
        try:
            node = (directory / "node").read_text()
        except OSError:  # `start` writes it before it sends the command
            why = "it was ended before it began"
            self._obey([fs.WorkerExit(am.Exited(worker, why=why, began=False))])
            return
        self._directories[worker] = directory
        self._obey(self.state.adopt(worker, node, end_position(directory), time.monotonic()))

    def logs(self, directory: Path, begin: int, max_bytes: int = 256 * 1024) -> list[Line]:
        return read_lines(directory, begin, max_bytes)

    def tail_position(self, directory: Path, lines: int) -> int:
        return tail_position(directory, lines)

    def usage(self) -> dict[tuple[str, int], GpuUsage]:
        agents = list(self.state.agents.values())
        return {
            key: GpuUsage(usage.utilisation, usage.memory_mb)
            for agent in agents
            for key, usage in list(agent.usage.items())
        }

    def warm_up(self) -> None:
        self._obey(self.state.warm_up())

    def close(self) -> None:
        """Close all connections. Workers and agents continue."""
        if self._ticker is not None:
            self._ticker.cancel()
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        for link in self._links.values():
            link.close()

    # Connections

    def begin(self) -> None:
        """Begin to watch leases."""
        if self._ticker is None:
            self._ticker = asyncio.get_running_loop().create_task(self._tick())

    async def listen(self, host: str, port: int, tls: ssl.SSLContext) -> str:
        """Accept agents. Return the bound address."""
        self.begin()
        self._server = await asyncio.start_server(
            self._accept, host, port, ssl=tls, ssl_handshake_timeout=HANDSHAKE_TIMEOUT_S
        )
        bound = self._server.sockets[0].getsockname()
        return f"{bound[0]}:{bound[1]}"

    def embed(self, link: Link) -> None:
        """Serve the agent in this process, which needs no secret and no lease."""
        self.begin()
        self._spawn(self._serve(link, None, None))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        peer = writer.get_extra_info("peername")
        try:
            if self._strangers >= MAX_STRANGERS:
                return
            self._strangers += 1
            try:
                request, link = await StreamLink.answer(reader, writer, self._secret_of)
            finally:
                self._strangers -= 1
            await self._serve(link, request.purpose, request.job)
        except (OSError, EOFError, TimeoutError, asyncio.CancelledError):
            pass  # the agent has gone, or the control plane closes
        except AuthError as error:
            log.warning("refused an agent from %s: %s", peer, error)
        finally:
            self._tasks.discard(task)
            writer.close()

    def _secret_of(self, job: str, purpose: str) -> bytes | None:
        if purpose == JOIN and job in self._registry.tokens:
            return bytes.fromhex(self._registry.tokens[job].secret_hash)
        if purpose == AGENT and job in self._registry.agents:
            return bytes.fromhex(self._registry.agents[job].secret_hash)
        return None

    async def _serve(self, link: Link, purpose: str | None, job: str | None) -> None:
        """Serve one connection of an agent until it breaks."""
        agent, why = None, "connection closed"
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                hello = await link.receive()
            if not isinstance(hello, am.AgentHello):
                raise WireError("an agent must begin with AgentHello")
            if not self._hello(link, hello, purpose, job):
                return
            agent = hello.agent
            while self._links.get(agent) is link:
                message = await link.receive()
                if self._links.get(agent) is link:
                    self._obey(self.state.received(agent, message, time.monotonic()))
        except (OSError, EOFError, TimeoutError):
            pass
        except WireError as error:
            why = str(error)
            log.warning("cut the connection of agent %s: %s", agent, why)
        finally:
            if agent is not None and self._links.get(agent) is link:
                del self._links[agent]
                self._obey(self.state.disconnected(agent, why, time.monotonic()))
            link.close()

    def _hello(self, link: Link, hello: am.AgentHello, purpose: str | None, job: str | None) -> bool:
        """Accept or refuse the agent."""
        credential, instance = "", EMBEDDED
        try:
            if purpose == JOIN:
                self._registry.check_token(job or "", hello.credential, hello.agent, time.time())
                credential = new_secret()
                instance = hash_secret(credential)
            elif purpose == AGENT:
                instance = hash_secret(hello.credential)
                if job != hello.agent or instance != self._registry.agents[hello.agent].secret_hash:
                    raise TokenError("the secret of this agent is not the one it was given")
        except TokenError as error:
            link.send(am.Refused(str(error), final=True))
            return False
        leased = purpose is not None
        effects = self.state.hello(
            hello, instance, time.monotonic(), time.time(), credential=credential, leased=leased
        )
        if effects and isinstance(effects[0], fs.Refuse):
            log.warning("refused agent %s: %s", hello.agent, effects[0].why)
            link.send(am.Refused(effects[0].why, effects[0].final))
            return False
        # It is on disk before the agent can start anything: a restarted control plane knows who may have workers.
        self._registry.remember(hello.agent, KnownAgent(instance, hello.nodes, leased))
        if purpose == JOIN and job is not None:
            self._registry.use_token(job, hello.agent)
        old = self._links.get(hello.agent)
        self._links[hello.agent] = link
        if old is not None:
            old.close()
        self._obey(effects)
        return True

    async def _tick(self) -> None:
        """Check time-outs. While this process was suspended it read no messages: the agents were not silent."""
        while True:
            before_s = time.monotonic()
            await asyncio.sleep(TICK_S)
            late_s = time.monotonic() - before_s - TICK_S
            if late_s > TICK_S:
                self.state.excuse(late_s)
            self._obey(self.state.tick(time.monotonic()))

    # Effects

    def _obey(self, effects: list[fs.Effect]) -> None:
        for effect in effects:
            if isinstance(effect, fs.Send):
                if effect.agent in self._links:
                    self._links[effect.agent].send(effect.message)
            elif isinstance(effect, fs.Cut):
                self._links.pop(effect.agent).close()
            elif isinstance(effect, fs.AppendLog):
                # On a full disk the output is lost, as it is on a node: the worker must not wait for it.
                with contextlib.suppress(OSError):
                    self._log_copy.append(self._directories[effect.worker], effect.position, effect.data)
            elif isinstance(effect, fs.WorkerExit):
                self._report(effect.exited)
            elif isinstance(effect, (fs.NodeUp, fs.NodeUnreachable, fs.NodeLost, fs.NodeLeaving)):
                asyncio.get_running_loop().call_soon(self.on_node, effect)

    def _report(self, exited: am.Exited) -> None:
        exit_ = Exit(
            worker=exited.worker,
            code=exited.code,
            signal=exited.signal,
            why=exited.why,
            began=exited.began,
            asked_to_end=exited.told,
            ago_s=exited.ago_s,
        )
        asyncio.get_running_loop().call_soon(lambda: self.on_exit(exit_))


def _node_info(node: am.NodeFacts) -> NodeInfo:
    return NodeInfo(
        name=node.name,
        gpus=node.gpus,
        gpu_type=node.gpu_type,
        virtual=node.virtual,
        devices=node.devices,
        rack=node.rack,
        domain=node.domain,
        gpu_memory_mb=node.gpu_memory_mb,
    )
