"""Policies by name: those of Shoal, and those that other packages add by an entry point."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

import numpy as np

from shoal.core.errors import ShoalError, did_you_mean
from shoal.policies.base import Policy, make_options

#: name -> module:class, so that listing the names imports nothing.
BUILT_IN = {
    "fifo": "shoal.policies.fifo:Fifo",
    "srtf": "shoal.policies.shortest:Srtf",
    "srsf": "shoal.policies.shortest:Srsf",
    "tiresias-l": "shoal.policies.tiresias:TiresiasL",
    "tiresias-g": "shoal.policies.gittins:TiresiasG",
    "max-min": "shoal.policies.maxmin:MaxMin",
    "themis": "shoal.policies.themis:Themis",
    "optimus": "shoal.policies.optimus:Optimus",
    "afs-l": "shoal.policies.afs_l:AfsL",
    "afs-p": "shoal.policies.afs_p:AfsP",
    "gandiva-fair": "shoal.policies.gandiva_fair:GandivaFair",
    "fair-afs": "shoal.policies.fair_afs:FairAfs",
}

ENTRY_POINT_GROUP = "shoal.policies"


def policy_names() -> list[str]:
    """All policies that can be named."""
    return [*BUILT_IN, *(e.name for e in entry_points(group=ENTRY_POINT_GROUP) if e.name not in BUILT_IN)]


def policy_class(name: str) -> type[Policy]:
    """The class of a policy."""
    if name in BUILT_IN:
        module, _, attribute = BUILT_IN[name].partition(":")
        found = getattr(import_module(module), attribute)
    else:
        for entry in entry_points(group=ENTRY_POINT_GROUP):
            if entry.name == name:
                found = entry.load()
                break
        else:
            raise ShoalError(f"there is no policy {name!r}; {did_you_mean(name, policy_names())}")
    if not (isinstance(found, type) and issubclass(found, Policy)):
        raise ShoalError(
            f"policy {name!r} is {found!r}, which is not a subclass of shoal.policies.base.Policy"
        )
    return found


def make_policy(name: str, options: dict[str, str] | None = None, seed: int = 0) -> Policy:
    """A policy ready to decide."""
    cls = policy_class(name)
    made: Any = make_options(cls, options or {})
    return cls(made, rng=np.random.default_rng(seed))
