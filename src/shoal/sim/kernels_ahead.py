"""What is compiled late in a first run, or takes longest, with the types it is compiled for.

A second process compiles these one after the other. It meets the first one, which compiles all as it needs it,
about halfway. A kernel that is missing here, or has other types in the end, costs some time and nothing else.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from numba.types import boolean, float64, int32, int64

from shoal.core import ledger, view_kernels
from shoal.core.cluster import Cluster
from shoal.placement import optimus_place, pack
from shoal.policies import types
from shoal.policies.afs import tournament_by_gain

#: A kernel with the types of its arguments.
Ahead = tuple[Any, tuple[Any, ...]]

_FLOATS, _TABLE, _INTS, _ROWS, _BOOLS = float64[::1], float64[:, ::1], int32[::1], int64[::1], boolean[::1]

_PACK = (pack.choose, (_INTS, _INTS, int64, int64, _INTS, _INTS, int64))
_EQUAL_PARTS = (optimus_place._optimus, (_TABLE, _INTS, _INTS, _INTS, _TABLE, _TABLE, int64))
_GIVE_TYPES = (
    types._give_types,
    (*(_INTS,) * 4, _FLOATS, int32[:, :], int32[:, ::1], _ROWS, boolean, boolean),
)
_SET_SHARES = (
    view_kernels.set_shares,
    (_TABLE, int32[:, ::1], _ROWS, *(_INTS,) * 3, _BOOLS, float64, int64[:, ::1]),
)

_HAND_OUT = (tournament_by_gain.hand_out_by_gain, (_INTS, _INTS, _FLOATS, _INTS, _INTS, *(int64,) * 3))


def traits_of(cluster: Cluster) -> list[str]:
    """What decides which kernels are needed."""
    holds = {
        "nodes": not cluster.pooled,
        "types": len(cluster.gpu_types) > 1,
        "users": len(cluster.users) > 1,
    }
    return [trait for trait, does in holds.items() if does]


def ahead(policy: str, traits: Collection[str]) -> list[Ahead]:
    """What to compile for a policy on a cluster with these traits, in this order."""
    nodes, types_ = "nodes" in traits, "types" in traits
    found: list[Ahead] = []
    if policy == "fair-afs":
        found += (_HAND_OUT, _PACK) if nodes else (_HAND_OUT,)
    elif policy != "gandiva-fair":
        found += (_EQUAL_PARTS if policy == "optimus" else _PACK,) if nodes else ()
        found += (_GIVE_TYPES,) if types_ else ()
    found.append(_SET_SHARES)
    return found + _of_ledger(types_) if "users" in traits else found


def _of_ledger(several_types: bool) -> list[Ahead]:
    by_type = int32[:, :] if several_types else int32[:, ::1]
    return [
        (ledger.entitlement, (_FLOATS, _FLOATS, _TABLE, _FLOATS, _INTS)),
        (ledger.demand_and_use, (*(_INTS,) * 4, by_type, int64)),
        (ledger.fill_rates, (float64[:, :, ::1], *(_TABLE,) * 3)),
    ]
