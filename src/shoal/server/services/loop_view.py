"""The parts of the control loop that services read."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Protocol

from shoal.scheduler.scheduler import Scheduler
from shoal.server.loop.live_job import LiveJob
from shoal.server.loop.node_table import NodeTable


class LoopView(Protocol):
    """Services read these and never write to them. A change of policy replaces the scheduler: do not keep it."""

    @property
    def jobs(self) -> Mapping[int, LiveJob]: ...

    @property
    def scheduler(self) -> Scheduler: ...

    @property
    def table(self) -> NodeTable: ...

    @property
    def policy_name(self) -> str: ...

    @property
    def decided_s(self) -> float | None:
        """Time of the last decision."""

    @property
    def unmet(self) -> Set[int]:
        """Jobs that wait for GPUs which others have not released yet."""

    def drained_names(self) -> list[str]:
        """Nodes that an admin has taken out of use."""

    def now_s(self) -> float: ...
