"""What fair policies compile where jobs are bound to nodes, with the types it is compiled for.

That is most of what they compile, and what is needed late, or takes longest, comes first: a second process that
compiles these one after the other meets the first one, which compiles them as it needs them, halfway.
"""

from __future__ import annotations

from typing import Any

from numba.types import NamedTuple, boolean, float64, int32, int64

from shoal.placement import pack
from shoal.policies.fair import balancer, guard, homes, kernels, pools, relief

_FLOATS, _TABLE, _INTS, _ROWS, _BOOLS = float64[::1], float64[:, ::1], int32[::1], int64[::1], boolean[::1]
_SCENE = NamedTuple((_INTS, _INTS, int64, int64, int64, _FLOATS, _FLOATS, _FLOATS), guard.Scene)
_CHOICE = NamedTuple((_BOOLS, _ROWS, int64[:, ::1]), guard.Choice)

_DUE_RATES = (kernels.due_rates, (_TABLE, *(_INTS,) * 4, _FLOATS, _BOOLS))
_RETYPE = (homes.retype, (_ROWS, *(_INTS,) * 3, *(_TABLE,) * 3, _BOOLS, int64))

#: By policy: kernels, each with the types of its arguments.
AHEAD: dict[str, tuple[tuple[Any, tuple[Any, ...]], ...]] = {
    "gandiva-fair": (
        (guard.steer, (_SCENE, _CHOICE, _BOOLS, _BOOLS, int64, _ROWS, _ROWS)),
        (relief.take_in, (_ROWS, _FLOATS, *(_INTS,) * 5, _BOOLS, _BOOLS, int64, _BOOLS, _INTS)),
        (relief.choose_sets, (_ROWS, _FLOATS, *(_INTS,) * 6, *(_BOOLS,) * 3, _INTS)),
        (balancer.attract, (_ROWS, _INTS, _BOOLS, _TABLE, *(_INTS,) * 3)),
        (kernels.split_stride, (_ROWS, _FLOATS, _FLOATS, *(_INTS,) * 6, _BOOLS, _BOOLS)),
        (balancer.balance, (_FLOATS, *(_INTS,) * 4, _BOOLS, _BOOLS, _FLOATS, int64, float64)),
        _DUE_RATES,
        _RETYPE,
    ),
    "fair-afs": (
        (pack.choose, (_INTS, _INTS, int64, int64, _INTS, _INTS, int64)),
        (
            pools.share_pools_by_gain,
            (*(_INTS,) * 3, _BOOLS, *(_FLOATS,) * 3, *(_INTS,) * 3, int64, int64, _INTS),
        ),
        (pools.grant, (_ROWS, _FLOATS, _INTS, _BOOLS, _FLOATS, float64[:], _FLOATS, float64, int64, _INTS)),
        _DUE_RATES,
        _RETYPE,
    ),
}
