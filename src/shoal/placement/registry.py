"""Placements by name: those of Shoal, and those that other packages add by an entry point.

A named placement is a class (or an object) with a `name`, a `summary`, a frozen dataclass `Options`, and

    make(setting, options) -> Placer

On the command line it is written with its options after colons: `moving:horizon_s=600:max_moves=2`.
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
    """What a placement may rest on."""

    cluster: Cluster
    #: Whether the policy resizes jobs; if not, a share fits as decided or not at all.
    elastic: bool = True
    #: What the scheduler believes of its jobs now, by id: a live mapping, not a copy.
    profiles: Callable[[], Mapping[int, Profile]] = field(default=dict)
    #: Seconds without progress that moving a job costs here.
    move_s: float = 30.0
    #: Whether parameter servers are on a node of their own, not beside their workers.
    servers_apart: bool = False
    #: Whether a job (by id) can go on elsewhere without losing what it has done.
    may_move: Callable[[int], bool] = lambda job_id: True
    #: The policy's name, for one that has a placement of its own.
    policy: str = ""

    def speed(self, job_id: int, gpu_type: str, placement: Placement, servers: int) -> float:
        """The believed speed of a job at a placement; 0 if nothing is known of it."""
        profile = self.profiles().get(job_id)
        if profile is None:
            return 0.0
        gpus = sum(g for _, g in placement)
        return speed_at(profile, gpu_type, gpus, placement, servers, apart=self.servers_apart)


class NamedPlacement(Protocol):
    """What the registry holds."""

    name: ClassVar[str]
    summary: ClassVar[str]
    Options: ClassVar[type[Any]]

    @staticmethod
    def make(setting: Setting, options: Any) -> Placer: ...


_PLACEMENTS = Named("placement", ENTRY_POINT_GROUP, BUILT_IN)


def placement_names() -> list[str]:
    """All placements that can be named."""
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
    """The class and the options of a placement as it is written: NAME or NAME:key=value:key=value."""
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
    """A placer ready to place."""
    cls, options = parse_placement(word)
    return cls.make(setting, options)
