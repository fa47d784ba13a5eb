"""The agent's side of its protocol with the control plane: a state machine without I/O and without a clock.

The shell (`agent.py`) passes in messages and what happens to workers; the machine answers with effects, which the
shell carries out in order. Times are of the agent's lease clock (CLOCK_BOOTTIME).

The lease: the agent requests it at time t of its own clock, and it ends at t + lease_s of the same clock. The control
plane counts from the moment when it grants the request, which is later. It therefore never assumes that the lease has
ended while it has not, however long the messages were delayed and whatever the two clocks show.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from shoal.wire import agent_messages as am
from shoal.wire.messages import WireError

CHUNK_BYTES = 64 * 1024
"""The most that is read at once. Every line of a keeper fits."""
WINDOW_BYTES = 1024 * 1024
"""Log bytes of all workers together that may be sent and not yet acknowledged."""


@dataclass(frozen=True, slots=True)
class Send:
    message: am.FromAgent


@dataclass(frozen=True, slots=True)
class Do:
    """Carry out an order of the control plane. A worker to start has a directory of its own."""

    order: am.Order


@dataclass(frozen=True, slots=True)
class SetLease:
    """Keepers may let their workers run until this time of the lease clock."""

    until_s: float


@dataclass(frozen=True, slots=True)
class SaveCredential:
    """Use this secret from now on."""

    credential: str


@dataclass(frozen=True, slots=True)
class TurnedAway:
    """The control plane has refused the agent."""

    why: str
    final: bool


Effect = Send | Do | SetLease | SaveCredential | TurnedAway


@dataclass(frozen=True, slots=True)
class LogRead:
    """Output to read and to pass to `log_read`."""

    worker: str
    begin: int
    max_bytes: int


@dataclass(slots=True)
class Worker:
    exited: am.Exited | None = None
    ended_s: float | None = None
    #: The control plane wants its output.
    ships_log: bool = False
    log_sent: int = 0
    log_acked: int = 0
    #: When its output was last sent, as a number that rises.
    log_turn: int = 0


@dataclass(slots=True)
class AgentState:
    agent: str
    run: str
    nodes: tuple[am.NodeFacts, ...]
    credential: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    #: Started by this process or found on disk, and not forgotten.
    workers: dict[str, Worker] = field(default_factory=dict)
    epoch: str = ""
    done: int = 0
    welcomed: bool = False
    lease_s: float | None = None
    lease_until_s: float = -math.inf
    heartbeat_s: float = 5.0
    #: When the machine is taken away, and why.
    leaves: tuple[float, str] | None = None
    _hello_s: float = 0.0
    _requested_s: float = -math.inf
    _log_turns: int = 0

    # Connections

    def connected(self, now_s: float, wall_s: float) -> am.AgentHello:
        """A new connection is open. The shell no longer carries out messages of an earlier one."""
        self.disconnected()
        self._hello_s = now_s
        return am.AgentHello(
            agent=self.agent,
            run=self.run,
            nodes=self.nodes,
            clock_s=now_s,
            wall_s=wall_s,
            credential=self.credential,
            versions=self.versions,
            workers=tuple(self.workers),
            epoch=self.epoch,
            done=self.done,
        )

    def disconnected(self) -> None:
        self.welcomed = False

    def received(self, message: am.AgentMessage, now_s: float) -> list[Effect]:
        if isinstance(message, am.Refused):
            return [TurnedAway(message.why, message.final)]
        if isinstance(message, am.Welcome) and not self.welcomed:
            return self._welcome(message, now_s)
        if not self.welcomed:
            raise WireError(f"{type(message).__name__} before Welcome")
        if isinstance(message, am.Command):
            return self._command(message, now_s)
        if isinstance(message, am.Renewed):
            return self._renewed(message)
        if isinstance(message, am.LogAck):
            self._log_ack(message)
            return []
        raise WireError(f"a control plane does not send {type(message).__name__}")

    def _welcome(self, welcome: am.Welcome, now_s: float) -> list[Effect]:
        self.welcomed = True
        if welcome.epoch != self.epoch:  # a control plane that has restarted counts from 1 again
            self.epoch, self.done = welcome.epoch, 0
        self.lease_s, self.heartbeat_s = welcome.lease_s, welcome.heartbeat_s
        effects = self._extend_lease(self._hello_s)
        if welcome.credential:
            self.credential = welcome.credential
            effects.append(SaveCredential(welcome.credential))
        for name, worker in self.workers.items():
            worker.ships_log = name in welcome.logs
            worker.log_sent = worker.log_acked = welcome.logs.get(name, 0)
        ended = [name for name, worker in self.workers.items() if worker.exited is not None]
        effects += [self._report(name, now_s) for name in ended]
        return effects + self._announce_leaving(now_s)

    # Leases

    def renew(self, now_s: float, wall_s: float) -> list[Effect]:
        if not self.welcomed:
            return []
        self._requested_s = now_s
        return [Send(am.Renew(now_s, wall_s))]

    def _renewed(self, message: am.Renewed) -> list[Effect]:
        if message.clock_s > self._requested_s:
            raise WireError("a lease was granted that was not requested")
        return self._extend_lease(message.clock_s)

    def _extend_lease(self, begin_s: float) -> list[Effect]:
        if self.lease_s is None or begin_s + self.lease_s <= self.lease_until_s:
            return []
        self.lease_until_s = begin_s + self.lease_s
        return [SetLease(self.lease_until_s)]

    # Commands

    def _command(self, command: am.Command, now_s: float) -> list[Effect]:
        if command.seq <= self.done:
            raise WireError(f"command {command.seq} follows command {self.done}")
        self.done = command.seq
        return [*self._obey(command.order, now_s), Send(am.Ack(self.done))]

    def _obey(self, order: am.Order, now_s: float) -> list[Effect]:
        if isinstance(order, am.WarmUp):
            return [Do(order)]
        worker = self.workers.get(order.worker)
        if isinstance(order, am.Start):
            return [] if worker is not None else self._start(order, now_s)
        if worker is None:
            return []
        if isinstance(order, am.Forget):
            if worker.exited is None:
                raise WireError(f"worker {order.worker} is to be forgotten while it runs")
            del self.workers[order.worker]
            return [Do(order)]
        return [Do(order)] if worker.exited is None else []

    def _start(self, order: am.Start, now_s: float) -> list[Effect]:
        worker = self.workers[order.worker] = Worker(ships_log=True)
        if self.lease_s is not None and now_s >= self.lease_until_s:
            # The command was delayed. The control plane may have given the worker's GPU away meanwhile.
            why = "the lease of its node ended before it could start"
            worker.exited = am.Exited(order.worker, why=why, began=False, node_lost=True)
            worker.ended_s = now_s
            return [self._report(order.worker, now_s)]
        return [Do(order)]

    # Workers

    def found(self, worker: str) -> None:
        """An earlier process of this agent started the worker. The executor adopts it."""
        self.workers[worker] = Worker()

    def exited(self, exited: am.Exited, now_s: float) -> list[Effect]:
        """A worker has ended, `exited.ago_s` before `now_s`."""
        worker = self.workers[exited.worker]
        assert worker.exited is None, exited.worker
        worker.exited = exited
        worker.ended_s = None if exited.ago_s is None else now_s - exited.ago_s
        return [self._report(exited.worker, now_s)] if self.welcomed else []

    def _report(self, name: str, now_s: float) -> Effect:
        worker = self.workers[name]
        assert worker.exited is not None
        ago_s = None if worker.ended_s is None else max(now_s - worker.ended_s, 0.0)
        return Send(msgspec.structs.replace(worker.exited, ago_s=ago_s))

    # Logs

    def log_reads(self) -> Iterator[LogRead]:
        """The output that may be sent now. Pass each to `log_read` before the next is taken.

        Each read has room for a whole chunk, so there is no line that does not fit. The worker whose output was sent
        longest ago comes first: one that prints much does not keep the others from being read.
        """
        for name in sorted(self.workers, key=lambda name: self.workers[name].log_turn):
            worker = self.workers[name]
            unacknowledged = sum(w.log_sent - w.log_acked for w in self.workers.values())
            if not self.welcomed or unacknowledged > WINDOW_BYTES - CHUNK_BYTES:
                return
            ended = worker.exited is not None and worker.log_sent >= worker.exited.log_end
            if worker.ships_log and not ended:
                yield LogRead(name, worker.log_sent, CHUNK_BYTES)

    def log_read(
        self, read: LogRead, position: int, data: bytes, stamps_ahead_s: float = 0.0
    ) -> list[Effect]:
        """`data` was read at `position`, which is after `read.begin` if output was rotated away.

        `stamps_ahead_s`: by how much the clock that stamped the lines is ahead of the lease clock.
        """
        worker = self.workers.get(read.worker)
        if not self.welcomed or worker is None or not worker.ships_log or worker.log_sent != read.begin:
            return []
        if not data and position == read.begin:
            return []
        worker.log_sent = position + len(data)
        self._log_turns += 1
        worker.log_turn = self._log_turns
        return [Send(am.LogChunk(read.worker, read.begin, position, data, stamps_ahead_s))]

    def _log_ack(self, message: am.LogAck) -> None:
        worker = self.workers.get(message.worker)
        if worker is not None:
            worker.log_acked = max(worker.log_acked, message.position)

    def ports(self, free: tuple[int, ...]) -> list[Effect]:
        return [Send(am.Ports(free))] if self.welcomed else []

    def usage(self, gpus: tuple[am.Usage, ...]) -> list[Effect]:
        return [Send(am.UsageReport(gpus))] if self.welcomed and gpus else []

    def leaving(self, in_s: float, why: str, now_s: float) -> list[Effect]:
        """The machine will be taken away in `in_s` seconds."""
        self.leaves = (now_s + in_s, why)
        return self._announce_leaving(now_s) if self.welcomed else []

    def _announce_leaving(self, now_s: float) -> list[Effect]:
        if self.leaves is None:
            return []
        at_s, why = self.leaves
        return [Send(am.Leaving(max(at_s - now_s, 0.0), why))]
