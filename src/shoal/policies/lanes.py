"""Eight candidates of AFS-L at a time: the comparisons of `candidates` as vector instructions.

Each of these functions looks at eight columns that follow each other, with no branch, and names the first that
passes its test. They are written in LLVM's own terms because that is what makes them quick: left to find
vectors in a plain loop, LLVM does so or not by how long the loop is and what surrounds it. Where a processor
has narrower vectors they are several instructions. No number is a NaN here.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

#: Columns looked at together.
LANES = 8

_FLOAT, _INT = ir.DoubleType(), ir.IntType(64)
_FLOATS, _INTS = ir.VectorType(_FLOAT, LANES), ir.VectorType(_INT, LANES)
_LANE = ir.Constant(_INTS, list(range(LANES)))
_LOWEST = ir.Constant(_FLOATS, [float("-inf")] * LANES)
_HIGHEST = ir.Constant(_FLOATS, [float("inf")] * LANES)

_FOUND = types.Tuple((types.int64, types.float64, types.float64))
_BEST = types.Tuple((types.float64,) * 4)


@intrinsic
def first_to_beat(
    typing: Any, jobs: Any, begin: Any, skip: Any, length: Any, short: Any, long_: Any
) -> tuple[Any, Any]:
    """The first of the eight candidates from `begin` on, but for those to `skip`, that beats the holder.

    LANES if none does; and the largest gains that those before it set against the holder: as the shorter
    job, of those that are not longer, and as the longer job, of all.
    """

    def code(context: Any, build: Any, signature: Any, args: Any) -> Any:
        jobs, begin, skip, *holder = args
        lengths, shorts, longs = _columns(context, build, signature.args[0], jobs, begin, 3)
        length, short, long_ = (_all(build, x, _FLOATS) for x in holder)
        shorter = build.fcmp_ordered("<=", lengths, length)
        beats = build.select(
            shorter, build.fcmp_ordered(">=", shorts, long_), build.fcmp_ordered(">", longs, short)
        )
        found = _first_and_rivals(build, beats, skip, shorter, shorts, longs)
        return context.make_tuple(build, _FOUND, found)

    return _FOUND(jobs, types.int64, types.int64, types.float64, types.float64, types.float64), code


@intrinsic
def first_that_may(
    typing: Any, blocks: Any, begin: Any, skip: Any, length: Any, short: Any, long_: Any, bar: Any
) -> tuple[Any, Any]:
    """Likewise, the first of eight blocks (or groups) below which somebody may beat the holder.

    A block's values fail the test only if those of all below it fail. If those below it that reach the bar
    are all longer than the holder, nobody who is not longer beats it, and they gain less than the bar.
    """

    def code(context: Any, build: Any, signature: Any, args: Any) -> Any:
        blocks, begin, skip, length_, short_, long_value, bar = args
        lengths, shorts, longs, above = _columns(context, build, signature.args[0], blocks, begin, 4)
        length, short, long_ = (_all(build, x, _FLOATS) for x in (length_, short_, long_value))
        shorter = build.fcmp_ordered("<=", lengths, length)
        gains_more = build.fcmp_ordered(">", longs, short)
        may = build.and_(build.fcmp_ordered(">=", shorts, long_), build.or_(shorter, gains_more))
        # A bar above what the holder gains says nothing of those who beat it.
        reach = build.select(
            build.fcmp_ordered("<=", bar, long_value), length_, ir.Constant(_FLOAT, float("inf"))
        )
        barred = build.and_(
            build.fcmp_ordered(">", above, _all(build, reach, _FLOATS)), build.not_(gains_more)
        )
        barred = build.and_(may, barred)
        shorts = build.select(barred, _all(build, bar, _FLOATS), shorts)
        found = _first_and_rivals(build, build.and_(may, build.not_(barred)), skip, shorter, shorts, longs)
        return context.make_tuple(build, _FOUND, found)

    holder = (types.float64,) * 3
    return _FOUND(blocks, types.int64, types.int64, *holder, types.float64), code


@intrinsic
def best_of_jobs(typing: Any, jobs: Any, begin: Any, bar: Any) -> tuple[Any, Any]:
    """What a block of eight candidates carries: see the rows of `candidates`."""

    def code(context: Any, build: Any, signature: Any, args: Any) -> Any:
        lengths, shorts, longs = _columns(context, build, signature.args[0], args[0], args[1], 3)
        reaches = build.fcmp_ordered(">=", shorts, _all(build, args[2], _FLOATS))
        above = build.select(reaches, lengths, _HIGHEST)
        return context.make_tuple(build, _BEST, _best(build, lengths, shorts, longs, above))

    return _BEST(jobs, types.int64, types.float64), code


@intrinsic
def best_of_blocks(typing: Any, blocks: Any, begin: Any) -> tuple[Any, Any]:
    """What a group of eight blocks carries."""

    def code(context: Any, build: Any, signature: Any, args: Any) -> Any:
        rows = _columns(context, build, signature.args[0], args[0], args[1], 4)
        return context.make_tuple(build, _BEST, _best(build, *rows))

    return _BEST(blocks, types.int64), code


def _columns(context: Any, build: Any, kind: Any, array: Any, begin: Any, rows: int) -> list[Any]:
    """Eight columns from `begin` on of the first few rows of a two-dimensional array."""
    found = context.make_array(kind)(context, build, array)
    width, at, loaded = build.extract_value(found.shape, 1), begin, []
    for _ in range(rows):
        place = build.gep(found.data, [at], source_etype=_FLOAT)
        loaded.append(build.load(build.bitcast(place, _FLOATS.as_pointer()), align=8))
        at = build.add(at, width)
    return loaded


def _all(build: Any, value: Any, kind: Any) -> Any:
    """The same value in all lanes."""
    nothing = ir.Constant(kind, ir.Undefined)
    one = build.insert_element(nothing, value, ir.Constant(ir.IntType(32), 0))
    return build.shuffle_vector(one, nothing, ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES))


def _first_and_rivals(build: Any, passes: Any, skip: Any, shorter: Any, shorts: Any, longs: Any) -> list[Any]:
    asked = build.icmp_signed(">=", _LANE, _all(build, skip, _INTS))
    bits = build.zext(build.bitcast(build.and_(passes, asked), ir.IntType(LANES)), _INT)
    bits = build.or_(bits, ir.Constant(_INT, 1 << LANES))
    first = build.cttz(bits, ir.Constant(ir.IntType(1), 1))
    before = build.and_(asked, build.icmp_signed("<", _LANE, _all(build, first, _INTS)))
    as_short = build.select(build.and_(before, shorter), shorts, _LOWEST)
    as_long = build.select(before, longs, _LOWEST)
    return [first, _reduce(build, "fmax", as_short), _reduce(build, "fmax", as_long)]


def _best(build: Any, lengths: Any, shorts: Any, longs: Any, above: Any) -> list[Any]:
    rows = zip(("fmin", "fmax", "fmax", "fmin"), (lengths, shorts, longs, above))
    return [_reduce(build, how, values) for how, values in rows]


def _reduce(build: Any, how: str, values: Any) -> Any:
    name = f"llvm.vector.reduce.{how}.v{LANES}f64"
    kind = ir.FunctionType(_FLOAT, [_FLOATS])
    function = cgutils.get_or_insert_function(build.module, kind, name)
    return build.call(function, [values], fastmath=("nnan", "nsz"))
