"""Placements by name: the built-in ones, and those that other packages register as entry points.

A named placement is a class (or an object) with a `name`, a `summary`, a frozen dataclass `Options`, and

    make(setting, options) -> Placer

On the command line, options follow the name after colons: `moving:horizon_s=600:max_moves=2`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from shoal.core.cluster import Cluster
from shoal.core.errors import ShoalError
from shoal.core.named import Named
from shoal.core.options import make_options
from shoal.core.plan import Placement
from shoal.core.profile import Profile
from shoal.placement.placer import Placer
from shoal.placement.speed_at import speed_at

BUILT_IN = {
    "auto": "shoal.placement.built_in:AUTO",
    "pool": "shoal.placement.built_in:POOL",
    "keep-and-pack": "shoal.placement.built_in:KEEP_AND_PACK",
    "node-or-whole-nodes": "shoal.placement.built_in:NODE_OR_WHOLE_NODES",
    "moving": "shoal.placement.built_in:MOVING",
    "optimus": "shoal.placement.built_in:OPTIMUS",
    "liquid": "shoal.placement.built_in:LIQUID",
    "liquid-batch": "shoal.placement.built_in:LIQUID_BATCH",
}

ENTRY_POINT_GROUP = "shoal.placements"


@dataclass(frozen=True, slots=True)
class Setting:
    """What a placement may use: the cluster, and what is known about the jobs and the policy."""

    cluster: Cluster
    #: Whether the policy resizes jobs. If not, a share is placed as decided or not at all.
    elastic: bool = True
    #: Returns the scheduler's current profiles by job id (the live mapping, not a copy).
    profiles: Callable[[], Mapping[int, Profile]] = field(default=dict)
    #: Seconds without progress that a move costs a job.
    move_s: float = 30.0
    #: Whether parameter servers run on a node of their own instead of beside their workers.
    servers_apart: bool = False
    #: Whether a job (by id) can move without losing its progress.
    may_move: Callable[[int], bool] = lambda job_id: True
    #: The policy's name: `auto` chooses a placement by it.
    policy: str = ""

    def speed(self, job_id: int, gpu_type: str, placement: Placement, servers: int) -> float:
        """The estimated speed of a job at a placement; 0 if the job has no profile."""
        profile = self.profiles().get(job_id)
        if profile is None:
            return 0.0
        gpus = sum(g for _, g in placement)
        return speed_at(profile, gpu_type, gpus, placement, servers, apart=self.servers_apart)


class NamedPlacement(Protocol):
    """A placement in the registry."""

    name: ClassVar[str]
    summary: ClassVar[str]
    Options: ClassVar[type[Any]]

    @staticmethod
    def make(setting: Setting, options: Any) -> Placer: ...


_PLACEMENTS = Named("placement", ENTRY_POINT_GROUP, BUILT_IN)


def placement_names() -> list[str]:
    """The names of all placements."""
    return _PLACEMENTS.names()


def placement_class(name: str) -> type[NamedPlacement]:
    """The class of a placement."""
    found = _PLACEMENTS.find(name)
    missing = [a for a in ("name", "summary", "Options", "make") if not hasattr(found, a)]
    if missing:
        raise ShoalError(f"placement {name!r} is {found!r}, which has no {missing[0]}; see docs/placement.md")
    cls: type[NamedPlacement] = found
    return cls


def parse_placement(word: str) -> tuple[type[NamedPlacement], Any]:
    """Parse NAME or NAME:key=value:key=value into a class and its options."""
    name, *pairs = word.split(":")
    cls = placement_class(name)
    given = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise ShoalError(f"--placement {word}: write {name}:option=value, not {pair!r}")
        given[key] = value
    return cls, make_options(cls, given, "placement")


def make_placer(word: str, setting: Setting) -> Placer:
    """Make the placer that `word` names."""
    cls, options = parse_placement(word)
    return cls.make(setting, options)
