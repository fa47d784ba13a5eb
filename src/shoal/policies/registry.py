"""Policies by name: those of Shoal, and those that other packages register as entry points."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import is_dataclass
from typing import Any

import numpy as np

from shoal.core.errors import ShoalError
from shoal.core.named import Named
from shoal.core.options import make_options
from shoal.policies.base import Policy

BUILT_IN = {
    "fifo": "shoal.policies.fifo:Fifo",
    "srtf": "shoal.policies.srtf:Srtf",
    "srsf": "shoal.policies.srtf:Srsf",
    "tiresias-l": "shoal.policies.tiresias:TiresiasL",
    "tiresias-g": "shoal.policies.gittins:TiresiasG",
    "max-min": "shoal.policies.max_min:MaxMin",
    "themis": "shoal.policies.themis:Themis",
    "optimus": "shoal.policies.optimus.optimus:Optimus",
    "afs-l": "shoal.policies.afs.afs_l:AfsL",
    "afs-p": "shoal.policies.afs.afs_p:AfsP",
    "gandiva-fair": "shoal.policies.gandiva_fair.gandiva_fair:GandivaFair",
    "fair-afs": "shoal.policies.gandiva_fair.fair_afs:FairAfs",
}

ENTRY_POINT_GROUP = "shoal.policies"

_POLICIES = Named("policy", ENTRY_POINT_GROUP, BUILT_IN)


def policy_names() -> list[str]:
    """The names of all policies."""
    return _POLICIES.names()


def policy_class(name: str) -> type[Policy]:
    """The class of a policy."""
    found = _POLICIES.find(name)
    if not (isinstance(found, type) and issubclass(found, Policy)):
        raise ShoalError(
            f"policy {name!r} is {found!r}, which is not a subclass of shoal.policies.base.Policy"
        )
    if not is_dataclass(found.Options):
        raise ShoalError(f"the Options of policy {name!r} are not a dataclass")
    return found


def policy_classes() -> dict[str, type[Policy]]:
    """All usable policies, by name."""
    found = {}
    for name in policy_names():
        with suppress(ShoalError):
            found[name] = policy_class(name)
    return found


def unusable_policies() -> list[str]:
    """Why policies of other packages cannot be used, one line each."""
    reasons = []
    for name in policy_names():
        try:
            policy_class(name)
        except ShoalError as error:
            reasons.append(str(error))
    return reasons


def make_policy(name: str, options: dict[str, str] | None = None, seed: int = 0) -> Policy:
    """Create a policy from its name and the text of its options."""
    cls = policy_class(name)
    made: Any = make_options(cls, options or {})
    return cls(made, rng=np.random.default_rng(seed))
