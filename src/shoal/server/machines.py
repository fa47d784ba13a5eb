"""The machines of a server: the agent in its own process, and the port where all other agents and workers connect."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from shoal.agents.agent import Agent, node_facts
from shoal.agents.certificate import fingerprint_of, make_certificate, server_context
from shoal.agents.fleet import AgentExecutor
from shoal.agents.fleet_records import Agent as FleetAgent
from shoal.agents.fleet_records import Timing
from shoal.agents.join_tokens import token_id
from shoal.agents.link import MemoryLink
from shoal.agents.main import versions
from shoal.agents.registry import AgentRegistry
from shoal.core.errors import ShoalError
from shoal.executors.local import LocalExecutor
from shoal.server.gateway import Gateway
from shoal.server.home import Home
from shoal.server.loop.runner import Addresses
from shoal.server.options import PortInUse
from shoal.wire.regular_file import write_new
from shoal.wire.service import ControlService

log = logging.getLogger("shoal.server")

HERE = "local"
"""The name of the agent in the server's process."""
ANY_HOST = ("0.0.0.0", "::", "")
RETRY_S = 1.0
#: How long those wait who need other machines to be able to connect.
LISTEN_S = 10.0


class Machines:
    """`start` and `close` are its lifetime.

    `address` is where other machines reach the control plane. It is known once `listening` is done.
    """

    def __init__(
        self,
        home: Home,
        *,
        virtual_gpus: int | None,
        host: str = "127.0.0.1",
        port: int = 0,
        last_port: int = 0,
        advertise: str | None = None,
        lease_s: float | None = None,
    ) -> None:
        """`virtual_gpus`: None for the real GPUs of this machine, 0 for none of its GPUs.

        `port` is what a person asked for; without it, `last_port` is used if it is free.
        """
        self._home, self._host, self._port, self._last_port = home, host, port, last_port
        self._advertise = advertise or (reachable_address() if host in ANY_HOST else host)
        self.addresses = Addresses()
        self.registry = AgentRegistry(home.path / "agents.json")
        timing = Timing() if lease_s is None else Timing.of_lease(lease_s)
        self.executor = AgentExecutor(self.registry, timing=timing)
        self._local = LocalExecutor(virtual_gpus, own_files=home.path)
        self.virtual_gpus = virtual_gpus
        if virtual_gpus is None and (found := self._local.nodes()) and found[0].virtual:
            self.virtual_gpus = found[0].gpus  # a restarted server must find its workers on the same GPUs
        self.executor.why_virtual = self._local.why_virtual
        nodes = node_facts(HERE, self._local.nodes(), self._advertise, None, "rack0", "domain0")
        self.executor.expect(HERE, tuple(nodes.values()))
        self._agent_directory = home.path / "agent"
        self._agent = Agent(
            HERE, self._agent_directory, self._local, nodes, self._connect,
            versions=versions(), embedded=True, open_session=self._local.session,
            bind="" if host in ANY_HOST else host,
        )  # fmt: skip
        self._gateway: Gateway | None = None
        #: Why other machines cannot connect, and what to do. `on_trouble` gets it once.
        self.trouble = ""
        self.on_trouble: Callable[[str], None] = lambda text: None
        self._tasks: list[asyncio.Task[None]] = []
        #: Done when other machines can connect.
        self.listening: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def local(self) -> LocalExecutor:
        """The executor of this machine."""
        return self._local

    @property
    def workers(self) -> Path:
        """Where the agent in this process has the directories of its workers."""
        return self._agent_directory / "workers"

    @property
    def address(self) -> str:
        return self.addresses.elsewhere

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def take_over(self, workers: Iterable[Mapping[str, Any]], directory: Callable[[int, str], Path]) -> None:
        """Give the agent here the workers of a version without agents."""
        for row in workers:
            path = directory(row["job"], row["id"])
            link = self.workers / row["id"]
            if (path / "lock").exists() and not (path / "node").exists():
                with contextlib.suppress(OSError):
                    write_new(path / "node", row["node"])
                    link.symlink_to(path, target_is_directory=True)

    async def _connect(self) -> MemoryLink:
        ours, theirs = MemoryLink.pair()
        self.executor.embed(theirs)
        return ours

    def start(self, service: ControlService, on_listening: Callable[[], None]) -> None:
        """Connect the agent here, and listen for others. Call it after all workers were adopted."""
        self._tasks = [
            asyncio.create_task(self._agent.run()),
            asyncio.create_task(self._listen(service, on_listening)),
        ]

    async def _listen(self, service: ControlService, on_listening: Callable[[], None]) -> None:
        certificate, key = self._home.path / "control.pem", self._home.path / "control.key"
        try:
            if not certificate.exists():
                key.unlink(missing_ok=True)
                await asyncio.to_thread(make_certificate, certificate, key)
            context = await asyncio.to_thread(server_context, certificate, key)
            self._gateway = Gateway(service, self.executor)
            port = await self._bind(self._gateway, context)
        except (OSError, ShoalError) as error:
            self.trouble = str(error)
            self.listening.set_exception(error)
            self.listening.exception()  # whoever waits for it gets it; nobody has to
            log.error("other machines cannot connect: %s", error)
            return
        self.addresses.elsewhere = f"{self._advertise}:{port}"
        self.addresses.fingerprint = fingerprint_of(certificate)
        self.listening.set_result(None)
        on_listening()
        self.trouble = ""

    async def _bind(self, gateway: Gateway, context: Any) -> int:
        if not self._port and self._last_port and self._expected_agents:
            return await self._bind_again(gateway, context)
        wanted = [self._port] if self._port else [self._last_port, 0]
        for port in wanted:
            try:
                return await gateway.listen(self._host, port, context)
            except OSError as error:
                if port == wanted[-1]:
                    text = f"cannot listen at {self._host} port {port}: {error.strerror}"
                    option = "host" if error.errno == errno.EADDRNOTAVAIL else "port"
                    raise PortInUse(f"{text}; choose another --control-{option}") from None
        raise AssertionError

    @property
    def _expected_agents(self) -> int:
        """Machines that know the last port only, or have a token with it."""
        invited = [token for token in self.registry.tokens.values() if token.expires_s > time.time()]
        return sum(name != HERE for name in self.registry.agents) + len(invited)

    async def _bind_again(self, gateway: Gateway, context: Any) -> int:
        """Listen where the agents look for this server: they would not find it on another port."""
        while True:
            try:
                return await gateway.listen(self._host, self._last_port, context)
            except OSError as error:
                if not self.trouble:
                    place = f"{self._host} port {self._last_port}, where agents connect"
                    self.trouble = (
                        f"cannot listen at {place}: {error.strerror}; "
                        "end the process that has the port (it is tried every second), or start with another "
                        "--control-port and let the machines join again"
                    )
                    log.error(self.trouble)
                    self.on_trouble(self.trouble)
            await asyncio.sleep(RETRY_S)

    async def wait_until_listening(self) -> None:
        """Raise if other machines cannot connect."""
        while not self.listening.done():
            await asyncio.wait({self.listening}, timeout=LISTEN_S)
            # Without trouble it is only slow: the first decision may compile for a while.
            if self.trouble and not self.listening.done():
                raise PortInUse(self.trouble)
        self.listening.result()

    # -- what the engine's driver needs ------------------------------------------------------------

    def known(self) -> Mapping[str, FleetAgent]:
        """The agents on other machines, by name."""
        return {name: agent for name, agent in self.executor.state.agents.items() if name != HERE}

    def shares_state(self, node: str) -> bool:
        """Whether the machine of a node was proved to share the directory of the jobs' state."""
        owners = (a.name for a in self.known().values() if any(n.name == node for n in a.nodes))
        found = [self.executor.services.sharing(agent) for agent in owners]
        return any(sharing is not None and sharing.shares for sharing in found)

    def leaving(self, agent: str, in_s: float, why: str) -> None:
        self.executor.leaving(agent, in_s, why)

    def stays(self, agent: str) -> None:
        self.executor.stays(agent)

    def fenced(self, agent: str, why: str) -> None:
        if agent in self.executor.state.agents:
            self.executor.fenced(agent, why)

    def drop_token(self, token: str) -> None:
        self.registry.remove_token(token)

    # -- join tokens -------------------------------------------------------------------------------

    def make_token(self, lifetime_s: float) -> tuple[str, str]:
        """A new join token: its id, and the token itself. Other machines can connect already."""
        made = self.registry.create_token(self.addresses.fingerprint, time.time(), lifetime_s)
        return token_id(made.secret), str(made)

    async def close(self) -> None:
        """Workers, keepers and agents of other machines continue."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._gateway is not None:
            await self._gateway.close()
        self.executor.close()


def reachable_address() -> str:
    """The address of this machine by which it would reach others."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # nothing is sent: the kernel chooses the address
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"
