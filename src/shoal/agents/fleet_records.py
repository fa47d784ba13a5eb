"""What the control plane remembers of agents and their workers, and the effects that its state machine answers with."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum

from shoal import __version__
from shoal.executors.base import NodeChange, NodeInfo
from shoal.wire import agent_messages as am

CLOCK_DRIFT = 0.001
"""Two clocks may differ by this fraction of the time they measure. Quartz differs by less than a tenth of it."""
INSTALL = f"install version {__version__} of Shoal on its machine, as on the server, and start it again"
ANY_INSTANCE = ""
KEEPER_MARGIN_S = 5.0
"""How long keepers may take to see that the lease has ended and to kill their workers."""
MOST_RIVALS = 100


@dataclass(frozen=True, slots=True)
class Timing:
    lease_s: float = 600.0
    heartbeat_s: float = 5.0
    #: After so long without a message the connection is given up.
    silence_s: float = 20.0
    keeper_margin_s: float = KEEPER_MARGIN_S
    #: The longest lease that an earlier process of this control plane granted.
    earlier_lease_s: float = 0.0

    @staticmethod
    def of_lease(lease_s: float) -> Timing:
        """Heartbeats often enough for a lease of this length."""
        heartbeat_s = min(5.0, lease_s / 6)
        return Timing(lease_s, heartbeat_s, min(20.0, 4 * heartbeat_s))

    def alive_s(self, lease_s: float) -> float:
        """For how long after the grant of a lease a worker may be alive."""
        return lease_s * (1 + 2 * CLOCK_DRIFT) + self.keeper_margin_s


class Link(StrEnum):
    CONNECTED = "connected"
    UNREACHABLE = "unreachable"  # no connection; its workers may be alive
    LOST = "lost"  # none of its workers can be alive


# Effects


@dataclass(frozen=True, slots=True)
class Send:
    agent: str
    message: am.ToAgent


@dataclass(frozen=True, slots=True)
class Cut:
    """Close the connection to the agent."""

    agent: str
    why: str


@dataclass(frozen=True, slots=True)
class Refuse:
    """Answer this hello with a refusal. An earlier connection of the same name stays open."""

    why: str
    final: bool = False


@dataclass(frozen=True, slots=True)
class Accept:
    """This connection belongs to the agent now. An earlier one of the same process is closed."""

    agent: str
    instance: str
    nodes: tuple[am.NodeFacts, ...]


@dataclass(frozen=True, slots=True)
class AppendLog:
    worker: str
    #: The worker's directory at the control plane.
    directory: str
    position: int
    data: bytes
    #: By how much the clock that stamped the lines is ahead of ours.
    clock_ahead_s: float = 0.0


@dataclass(frozen=True, slots=True)
class WorkerExit:
    """The worker has ended, or it cannot be alive any more. Never repeated."""

    exited: am.Exited


@dataclass(frozen=True, slots=True)
class EndsUnknown:
    """The agent has workers that the control plane does not know, and was told to end them."""

    agent: str
    workers: tuple[str, ...]


Effect = Send | Cut | Refuse | Accept | AppendLog | WorkerExit | EndsUnknown | NodeChange


@dataclass(slots=True)
class Worker:
    node: str
    #: At the control plane.
    directory: str = ""
    #: The control plane has its output up to here.
    log_position: int = 0
    #: It has ended, and its output is still on the way.
    exited: am.Exited | None = None
    #: Its end was reported. Only its output is still wanted.
    reported: bool = False
    #: The command to start it was sent at least once, or another control plane sent it.
    sent: bool = True


@dataclass(slots=True)
class Agent:
    name: str
    #: Identifies the state directory of the agent. Another machine under the same name has another one.
    instance: str
    nodes: tuple[am.NodeFacts, ...]
    link: Link
    #: Until then its workers may be alive without a connection.
    alive_until_s: float
    #: False: it is part of the control plane's process, and its workers survive a restart without a lease.
    leased: bool = True
    heard_s: float = -math.inf
    run: str = ""
    #: Refused agents of this name: run -> time of the first refusal.
    rivals: dict[str, float] = field(default_factory=dict)
    leaves: tuple[float, str] | None = None
    workers: dict[str, Worker] = field(default_factory=dict)
    #: Workers that the control plane does not know and that have not ended yet: they may use any of its GPUs.
    unknown: set[str] = field(default_factory=set)
    next_seq: int = 1
    #: Commands that it has not acknowledged, by number.
    outbox: dict[int, am.Order] = field(default_factory=dict)
    usage: dict[tuple[str, int], am.Usage] = field(default_factory=dict)
    #: Ports of its machine that it keeps free.
    ports: list[int] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    #: Its wall clock minus ours at its last heartbeat. For people only: anybody may set it.
    wall_offset_s: float = 0.0
    #: Its lease clock minus our wall clock at its last heartbeat.
    lease_clock_offset_s: float = 0.0

    def told_clocks(self, lease_clock_s: float, wall_s: float, our_wall_s: float) -> None:
        self.wall_offset_s = wall_s - our_wall_s
        self.lease_clock_offset_s = lease_clock_s - our_wall_s

    @property
    def may_have_live_workers(self) -> bool:
        return any(not w.reported and w.exited is None for w in self.workers.values())


def node_info(node: am.NodeFacts, agent: Agent) -> NodeInfo:
    return NodeInfo(
        name=node.name,
        gpus=node.gpus,
        gpu_type=node.gpu_type,
        virtual=node.virtual,
        devices=node.devices,
        rack=node.rack,
        domain=node.domain,
        gpu_memory_mb=node.gpu_memory_mb,
        address=node.address,
        remote=agent.leased,
    )
