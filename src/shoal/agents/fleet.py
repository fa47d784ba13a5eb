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

from shoal.agents import fleet_records as fr
from shoal.agents import fleet_state as fs
from shoal.agents.join_tokens import TokenError, hash_secret, new_secret
from shoal.agents.link import AGENT, JOIN, Link, StreamLink
from shoal.agents.log_files import LogCopy
from shoal.agents.refusals import Refusal, Refusals, shown
from shoal.agents.registry import AgentRegistry, KnownAgent
from shoal.agents.services import AgentServices, Request
from shoal.agents.sessions import FleetSessions
from shoal.executors.base import (
    Exit,
    GpuUsage,
    NamedAccount,
    NodeChange,
    NodeInfo,
    NodeLeaving,
    NodeLost,
    NodeUnreachable,
    NodeUp,
    OwnAccount,
    WorkerSpec,
)
from shoal.executors.logs import Line, end_position, read_lines, tail_position, with_our_clock
from shoal.wire import agent_messages as am
from shoal.wire.auth import AuthError, OtherProtocol
from shoal.wire.channel import HANDSHAKE_TIMEOUT_S
from shoal.wire.messages import WireError
from shoal.wire.regular_file import read_regular, write_new
from shoal.wire.strangers import Strangers

log = logging.getLogger("shoal.agents")

TICK_S = 0.5
UNCHECKED_PORTS = range(20_000, 32_000)
LONGEST_NAME_BYTES = 4096
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
        timing: fr.Timing | None = None,
        on_node: Callable[[NodeChange], None] = lambda change: None,
        log_copy: LogCopy | None = None,
        services: AgentServices | None = None,
    ) -> None:
        timing = timing or fr.Timing()
        earlier_s = registry.raise_longest_lease(timing.lease_s)
        timing = fr.Timing(
            timing.lease_s, timing.heartbeat_s, timing.silence_s, timing.keeper_margin_s, earlier_s
        )
        self.on_exit: Callable[[Exit], None] = lambda exit_: None
        self.on_node = on_node
        #: Receives an agent and its workers that the control plane does not know. The agent ends them.
        self.on_unknown: Callable[[str, tuple[str, ...]], None] = lambda agent, workers: None
        #: Why the GPUs of this machine are virtual, if nobody asked for that.
        self.why_virtual = ""
        self.state = fs.FleetState(secrets.token_hex(8), timing)
        self._registry, self._log_copy = registry, log_copy or LogCopy()
        self.services = services or AgentServices()
        self._links: dict[str, Link] = {}
        self._own: str | None = None
        self.refusals = Refusals()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._ticker: asyncio.Task[None] | None = None
        self._strangers = Strangers()
        self.sessions = FleetSessions(self._connected_agent_of, self._send)
        for agent, known in registry.agents.items():
            self.state.restore(agent, known.secret_hash, known.nodes, time.monotonic(), leased=known.leased)

    # The executor

    def nodes(self) -> tuple[NodeInfo, ...]:
        """The nodes of connected agents, and those of the agent in this process."""
        return tuple(
            fr.node_info(node, agent)
            for agent in self.state.agents.values()
            if agent.link is fr.Link.CONNECTED or agent.name == self._own
            for node in agent.nodes
        )

    def awaited_nodes(self) -> tuple[NodeInfo, ...]:
        """The nodes of agents that joined an earlier process of this control plane and are not connected."""
        return tuple(
            fr.node_info(node, agent)
            for agent in self.state.agents.values()
            if agent.link is not fr.Link.CONNECTED and agent.name != self._own
            for node in agent.nodes
        )

    def expect(self, name: str, nodes: tuple[am.NodeFacts, ...]) -> None:
        """The agent of this name is part of this process and will connect with `embed`."""
        self._own = name
        self.state.restore(name, EMBEDDED, nodes, time.monotonic(), leased=False)

    def start(self, worker: WorkerSpec) -> None:
        if not am.is_worker_id(worker.worker):
            raise ValueError(f"{worker.worker!r} is not an id of a worker")
        try:
            worker.directory.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            worker.directory.mkdir(mode=0o700)  # a job may know the name of its next worker, and have made it
            write_new(worker.directory / "node", worker.node)
        except OSError as error:
            why = f"cannot start it: {error.strerror or error}"
            self._obey([fr.WorkerExit(am.Exited(worker.worker, why=why, began=False))])
            return
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
            gpus=worker.gpus,
            secret_files=worker.secret_files,
            waits_for_go=worker.waits_for_go,
            port=worker.port,
            tree=worker.tree,
            account=worker.account.name if isinstance(worker.account, NamedAccount) else "",
            may_be_root=isinstance(worker.account, OwnAccount) and worker.account.may_be_root,
            shared=isinstance(worker.account, OwnAccount) and worker.account.shared,
        )
        self._obey(self.state.start(order))

    def stop(self, worker: str, *, kill: bool = False) -> None:
        self._obey(self.state.order(am.Stop(worker, kill)))

    def suspend(self, worker: str) -> None:
        self._obey(self.state.order(am.Suspend(worker)))

    def wake(self, worker: str) -> None:
        self._obey(self.state.order(am.Wake(worker)))

    def warn(self, worker: str, signal: str) -> None:
        self._obey(self.state.order(am.Warn(worker, signal)))

    def go(self, worker: str) -> None:
        self._obey(self.state.order(am.Go(worker)))

    def free_port(self, node: str) -> int:
        # Without a connection, any port: the worker starts later, and it says so if the port is taken.
        return self.state.take_port(node) or secrets.choice(UNCHECKED_PORTS)

    def leaving(self, agent: str, in_s: float, why: str) -> None:
        """The machine of an agent will be taken away in `in_s` seconds."""
        if agent in self.state.agents:
            self._obey(self.state.leaving(agent, in_s, why, time.monotonic()))

    def stays(self, agent: str) -> None:
        """The machine of an agent will not be taken away after all."""
        if agent in self.state.agents:
            self._obey(self.state.stays(agent))

    def fenced(self, agent: str, why: str) -> None:
        """Somebody else has ended all processes of an agent and its workers."""
        self._obey(self.state.fenced(agent, why))

    def adopt(self, worker: str, directory: Path) -> None:
        """Take over a worker that an earlier process started. Call it before `listen`."""
        node = ""
        with contextlib.suppress(OSError, ValueError):  # a job may have changed it
            node = read_regular(directory / "node", LONGEST_NAME_BYTES).decode()
        if not node:  # `start` writes it before it sends the command
            why = "it was ended before it began"
            self._obey([fr.WorkerExit(am.Exited(worker, why=why, began=False))])
            return
        self._obey(self.state.adopt(worker, node, end_position(directory), time.monotonic(), str(directory)))

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
        self.state.warm = True
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
        self._spawn(self.serve(link, None, None))

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
            place = self._strangers.enter((peer or ("",))[0], writer.transport.abort)
            try:
                request, link = await StreamLink.answer(reader, writer, self.secret_of)
            finally:
                self._strangers.leave(place)
            await self.serve(link, request.purpose, request.job)
        except (OSError, EOFError, TimeoutError, asyncio.CancelledError):
            pass  # the agent has gone, or the control plane closes
        except AuthError as error:
            self.handshake_failed(str((peer or ("",))[0]), error)
        finally:
            self._tasks.discard(task)
            writer.close()

    def secret_of(self, job: str, purpose: str) -> bytes | None:
        if purpose == JOIN and job in self._registry.tokens:
            return bytes.fromhex(self._registry.tokens[job].secret_hash)
        if purpose == AGENT and job in self._registry.agents:
            return bytes.fromhex(self._registry.agents[job].secret_hash)
        return None

    def handshake_failed(self, address: str, error: AuthError) -> None:
        """Note an agent that could not prove who it is. What it says of itself may be wrong."""
        if error.claim is None or error.claim[1] not in (JOIN, AGENT):
            return
        job, purpose = error.claim
        agent = job[:64] if purpose == AGENT else ""
        if isinstance(error, OtherProtocol):
            why = f"it runs another version of Shoal ({error}): {fr.INSTALL}"
        elif purpose == JOIN:
            why = "its join token is not known, has expired or was removed: `shoal node join-token create`"
        else:
            why = (
                "it is not known, or was removed: start it with a new token of `shoal node join-token create`"
            )
        self._note_refusal(agent, address, why)

    def _note_refusal(self, agent: str, address: str, why: str) -> None:
        agent, why = shown(agent), shown(why)
        if self.refusals.add(Refusal(agent, address, why, time.time())):
            log.warning("refused agent %s at %s: %s", agent or "without a name", address, why)

    async def serve(self, link: Link, purpose: str | None, job: str | None) -> None:
        """Serve one connection of an agent until it breaks."""
        agent, why = None, "connection closed"
        try:
            try:
                async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                    hello = await link.receive()
            except WireError:
                why = f"the agent runs another version of Shoal: {fr.INSTALL}"
                self._refuse(link, job or "", why, final=True)
                return
            if not isinstance(hello, am.AgentHello):
                raise WireError("an agent must begin with AgentHello")
            if not self._hello(link, hello, purpose, job):
                return
            agent = hello.agent
            while self._links.get(agent) is link:
                message = await link.receive()
                if isinstance(message, am.FetchTree | am.Probed | am.Listening | am.Reached):
                    self._spawn(self._answer(link, agent, message))
                elif isinstance(message, am.SessionOutput | am.SessionEnded):
                    self.sessions.received(agent, message)
                elif self._links.get(agent) is link:
                    self._obey(self.state.received(agent, message, time.monotonic(), time.time()))
        except (OSError, EOFError, TimeoutError):
            pass
        except WireError as error:
            why = str(error)
            log.warning("cut the connection of agent %s: %s", agent, why)
        finally:
            if agent is not None and self._links.get(agent) is link:
                del self._links[agent]
                self.sessions.disconnected(agent)
                self._obey(self.state.disconnected(agent, why, time.monotonic()))
            link.close()

    async def _answer(self, link: Link, agent: str, request: Request) -> None:
        answer = await self.services.answer(agent, request)
        if answer is not None and self._links.get(agent) is link:
            link.send(answer)

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
                known = self._registry.agents.get(hello.agent)
                if known is None:  # since the handshake. It tries again, and is told what to do.
                    self._refuse(link, hello.agent, "it was removed from this control plane", final=False)
                    return False
                if job != hello.agent or instance != known.secret_hash:
                    raise TokenError("the secret of this agent is not the one it was given")
        except TokenError as error:
            self._refuse(link, hello.agent, str(error), final=True)
            return False
        leased = purpose is not None
        effects = self.state.hello(
            hello, instance, time.monotonic(), time.time(), credential=credential, leased=leased
        )
        if effects and isinstance(effects[0], fr.Refuse):
            self._refuse(link, hello.agent, effects[0].why, final=effects[0].final)
            return False
        # It is on disk before the agent can start anything: a restarted control plane knows who may have workers.
        self.refusals.accepted(hello.agent, link.peer)
        self._registry.remember(hello.agent, KnownAgent(instance, hello.nodes, leased))
        if purpose == JOIN and job is not None:
            self._registry.use_token(job, hello.agent)
        old = self._links.get(hello.agent)
        self._links[hello.agent] = link
        if old is not None:
            old.close()
            self.sessions.disconnected(hello.agent)
        self._obey(effects)
        for question in self.services.connected(hello.agent):
            link.send(question)
        return True

    def _refuse(self, link: Link, agent: str, why: str, *, final: bool) -> None:
        self._note_refusal(agent, link.peer, why)
        link.send(am.Refused(why, final))

    async def try_ways(self) -> None:
        """Let agents with GPUs try to connect to each other. `services.reaching` knows the result."""
        addresses = {
            agent.name: agent.nodes[0].address
            for agent in self.state.agents.values()
            if agent.name in self._links and any(node.gpus for node in agent.nodes)
        }
        await self.services.reaching.try_all(addresses, self._send)

    def agent_of(self, node: str) -> str | None:
        """The agent that has the node."""
        return next(
            (a.name for a in self.state.agents.values() if any(n.name == node for n in a.nodes)), None
        )

    def forget(self, agent: str) -> None:
        """Remove an agent that is lost. It may join again with a token."""
        self._registry.forget(agent)
        self.state.agents.pop(agent, None)

    async def _tick(self) -> None:
        """Check time-outs. While this process was suspended it read no messages: the agents were not silent."""
        while True:
            before_s = time.monotonic()
            await asyncio.sleep(TICK_S)
            late_s = time.monotonic() - before_s - TICK_S
            if late_s > TICK_S:
                self.state.excuse(late_s)
            self._obey(self.state.tick(time.monotonic()))

    def _connected_agent_of(self, worker: str) -> str | None:
        found = self.state.agent_of_worker(worker)
        return found.name if found is not None and found.name in self._links else None

    # Effects

    def _send(self, agent: str, message: am.ToAgent) -> None:
        if agent in self._links:
            self._links[agent].send(message)

    def _obey(self, effects: list[fr.Effect]) -> None:
        for effect in effects:
            if isinstance(effect, fr.Send):
                self._send(effect.agent, effect.message)
            elif isinstance(effect, fr.Cut):
                self._links.pop(effect.agent).close()
                self.sessions.disconnected(effect.agent)
            elif isinstance(effect, fr.AppendLog):
                # On a full disk the output is lost, as it is on a node: the worker must not wait for it.
                with contextlib.suppress(OSError):
                    data = with_our_clock(effect.data, effect.clock_ahead_s)
                    self._log_copy.append(Path(effect.directory), effect.position, data)
            elif isinstance(effect, fr.WorkerExit):
                self._report(effect.exited)
            elif isinstance(effect, fr.EndsUnknown):
                self.on_unknown(effect.agent, effect.workers)
            elif isinstance(effect, (NodeUp, NodeUnreachable, NodeLost, NodeLeaving)):
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
            node_lost=exited.node_lost,
        )
        asyncio.get_running_loop().call_soon(lambda: self.on_exit(exit_))
