"""Eight candidates of AFS at a time: the comparisons of its tournaments as vector instructions.

Each of these functions looks at eight columns that follow each other, with no branch, and names the first that
passes its test, or all of them as bits. They are written in LLVM's own terms because that is what makes them quick:
left to find vectors in a plain loop, LLVM does so or not by how long the loop is and what surrounds it. Where a
processor has narrower vectors they are several instructions. No number is a NaN here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

#: Columns looked at together, and those of a group, of eight times eight.
LANES, GROUP = 8, 64

_FLOAT, _INT = ir.DoubleType(), ir.IntType(64)
_FLOATS = ir.VectorType(_FLOAT, LANES)
#: Groups are looked at in halves of eight, as wide as most processors' vectors: wider ones are split, and badly.
_HALF = LANES // 2
_HALF_FLOATS, _HALF_INTS = ir.VectorType(_FLOAT, _HALF), ir.VectorType(_INT, _HALF)
_HIGHEST = ir.Constant(_FLOATS, [float("inf")] * LANES)
_LOWEST = ir.Constant(_FLOATS, [float("-inf")] * LANES)

_BITS = types.Tuple((types.int64, types.int64))
_BEST = types.Tuple((types.float64,) * 4)
_SEEN = types.Tuple((types.float64, types.int64))


# -- for AFS-L: `candidates` --------------------------------------------------------------------------------


@intrinsic
def first_to_beat(
    typing: Any, columns: Any, begin: Any, skip: Any, length: Any, short: Any, long_: Any
) -> tuple[Any, Any]:
    """The first of the eight candidates from `begin` on, but for those to `skip`, that beats the holder, or LANES."""

    def code(context: Any, build: Any, signature: Any, args: Any) -> Any:
        columns, begin, skip, *holder = args
        lengths, shorts, longs = _rows(context, build, signature.args[0], columns, begin, range(3))
        length, short, long_ = (_all(build, x, _FLOATS) for x in holder)
        beats = build.select(
            build.fcmp_ordered("<=", lengths, length),
            build.fcmp_ordered(">=", shorts, long_),
            build.fcmp_ordered(">", longs, short),
        )
        return _first(build, beats, skip)

    return types.int64(columns, types.int64, types.int64, *(types.float64,) * 3), code


@intrinsic
def first_that_may(
    typing: Any, columns: Any, begin: Any, skip: Any, row: Any, length: Any, short: Any, long_: Any
) -> tuple[Any, Any]:
    """Likewise, the first of eight blocks below which somebody may beat the holder.

    Somebody does if the largest gain as the longer job is above the holder's as the shorter one. Else it
    takes one that is not longer, by the lengths in `row`, and gains enough.
    """

    def code(context: Any, build: Any, signature: Any, args: Any) -> Any:
        columns, begin, skip, row, *holder = args
        lengths, shorts, longs = _rows(context, build, signature.args[0], columns, begin, (row, 1, 2))
        length, short, long_ = (_all(build, x, _FLOATS) for x in holder)
        may = build.and_(build.fcmp_ordered("<=", lengths, length), build.fcmp_ordered(">=", shorts, long_))
        may = build.or_(may, build.fcmp_ordered(">", longs, short))
        return _first(build, may, skip)

    return types.int64(columns, types.int64, types.int64, types.int64, *(types.float64,) * 3), code


@intrinsic
def best_of_jobs(typing: Any, jobs: Any, begin: Any, bar: Any) -> tuple[Any, Any]:
    """What a block of eight candidates carries: see the rows of `candidates`."""

    def code(context: Any, build: Any, signature: Any, args: Any) -> Any:
        lengths, shorts, longs = _rows(context, build, signature.args[0], args[0], args[1], range(3))
        reaches = build.fcmp_ordered(">=", shorts, _all(build, args[2], _FLOATS))
        above = build.select(reaches, lengths, _HIGHEST)
        return context.make_tuple(build, _BEST, _best(build, lengths, shorts, longs, above))

    return _BEST(jobs, types.int64, types.float64), code


@intrinsic
def best_of_blocks(typing: Any, blocks: Any, begin: Any) -> tuple[Any, Any]:
    """What a block of eight blocks carries."""

    def code(context: Any, build: Any, signature: Any, args: Any) -> Any:
        rows = _rows(context, build, signature.args[0], args[0], args[1], range(4))
        return context.make_tuple(build, _BEST, _best(build, *rows))

    return _BEST(blocks, types.int64), code


@intrinsic
def fetch(typing: Any, values: Any, at: Any) -> tuple[Any, Any]:
    """Have the value brought near, as it will soon be read."""

    def code(context: Any, build: Any, signature: Any, args: Any) -> Any:
        found = context.make_array(signature.args[0])(context, build, args[0])
        byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        function = cgutils.get_or_insert_function(build.module, kind, "llvm.prefetch.p0")
        place = build.bitcast(build.gep(found.data, [args[1]], source_etype=_FLOAT), byte)
        build.call(function, [place, *(ir.Constant(number, x) for x in (0, 3, 1))])  # to read, closest, data
        return context.get_dummy_value()

    return types.void(values, types.int64), code


# -- for AFS-P: `look_back`, `tournament_of_classes` ------------------------------------------------------------


@intrinsic
def who_beats(typing: Any, columns: Any, begin: Any, short: Any, long_: Any) -> tuple[Any, Any]:
    """Of eight candidates from `begin` on, as bits: who beats the holder by a coin, and who does without one."""

    def code(context: Any, build: Any, signature: Any, args: Any) -> Any:
        columns, begin, short, long_ = args
        shorts, longs = _rows(context, build, signature.args[0], columns, begin, (1, 2))
        by_coin = _bits(build, build.fcmp_ordered(">", shorts, _all(build, long_, _FLOATS)))
        surely = _bits(build, build.fcmp_ordered(">=", longs, _all(build, short, _FLOATS)))
        return context.make_tuple(build, _BITS, [by_coin, surely])

    return _BITS(columns, types.int64, types.float64, types.float64), code


@intrinsic
def who_gains_above(typing: Any, columns: Any, begin: Any, bound: Any) -> tuple[Any, Any]:
    """Of eight columns from `begin` on, as bits: whose gain as the shorter job is above this."""

    def code(context: Any, build: Any, signature: Any, args: Any) -> Any:
        columns, begin, bound = args
        (shorts,) = _rows(context, build, signature.args[0], columns, begin, (1,))
        return _bits(build, build.fcmp_ordered(">", shorts, _all(build, bound, _FLOATS)))

    return types.int64(columns, types.int64, types.float64), code


@intrinsic
def who_lasts(
    typing: Any, columns: Any, begin: Any, asked: Any, lucky: Any, short: Any, long_: Any
) -> tuple[Any, Any]:
    """Of eight candidates from `begin` on, as bits: whom nobody after it beats, if it holds.

    Those after it are the `asked` of the eight, the `lucky` of them by a coin, and others who gain at most `short`
    (if a coin is kind to them) and `long_`.
    """

    def code(context: Any, build: Any, signature: Any, args: Any) -> Any:
        columns, begin, asked, lucky, short, long_ = args
        shorts, longs = _rows(context, build, signature.args[0], columns, begin, (1, 2))
        challenge = build.select(_lanes(build, build.and_(asked, lucky)), shorts, _LOWEST)
        challenge = _of_those_after(build, challenge, _all(build, short, _FLOATS))
        outdo = build.select(_lanes(build, asked), longs, _LOWEST)
        outdo = _of_those_after(build, outdo, _all(build, long_, _FLOATS))
        lasts = build.and_(build.fcmp_ordered(">=", longs, challenge), build.fcmp_ordered(">", shorts, outdo))
        return build.and_(_bits(build, lasts), asked)

    return types.int64(columns, *(types.int64,) * 3, *(types.float64,) * 2), code


@intrinsic
def largest_of(typing: Any, columns: Any, row: Any, begin: Any, bits: Any) -> tuple[Any, Any]:
    """The largest value in a row of those of eight candidates from `begin` on whose bit is set."""

    def code(context: Any, build: Any, signature: Any, args: Any) -> Any:
        columns, row, begin, bits = args
        (values,) = _rows(context, build, signature.args[0], columns, begin, (row,))
        return _reduce(build, "fmax", build.select(_lanes(build, bits), values, _LOWEST))

    return types.float64(columns, types.int64, types.int64, types.int64), code


@intrinsic
def see_group(
    typing: Any,
    columns: Any,
    begin: Any,
    above: Any,
    lucky: Any,
    whole: Any,
    short: Any,
    long_: Any,
    seen: Any,
    row: Any,
) -> tuple[Any, Any]:
    """What the 64 candidates of a group mean to those before it, and in which of its blocks somebody may last.

    The largest gain as the shorter job of the `lucky` ones, and the blocks as bits. What
    comes after each block, as `who_lasts` has to know, goes into two rows of `seen`; of a group that is not `whole`
    only as the shorter job. The group is read from its turned row, so that a lane has a block; `above` are the columns
    of its blocks.
    """

    def code(context: Any, build: Any, signature: Any, args: Any) -> Any:
        columns, begin, above, lucky, whole, *after, seen, row = args
        kind = signature.args[0]
        lines = _chosen(build, _lines(context, build, kind, columns, begin, 4), lucky)
        lucky_ones = _largest_by_lane(build, lines)
        shorts, longs = _rows(context, build, kind, columns, above, (1, 2))
        most = build.select(whole, longs, _LOWEST)
        short, long_ = (_all(build, x, _FLOATS) for x in after)
        challenge, outdo = _of_those_after(build, lucky_ones, short), _of_those_after(build, most, long_)
        to, block = (
            context.make_array(signature.args[7])(context, build, seen),
            build.sdiv(begin, _number(LANES)),
        )
        for i, values in enumerate((challenge, outdo)):
            build.store(values, _place(build, to, build.add(row, _number(i)), block, _FLOATS), align=8)
        lasts = build.and_(build.fcmp_ordered(">=", longs, challenge), build.fcmp_ordered(">", shorts, outdo))
        return context.make_tuple(build, _SEEN, [_reduce(build, "fmax", lucky_ones), _bits(build, lasts)])

    numbers = (*(types.int64,) * 3, types.boolean, *(types.float64,) * 2)
    return _SEEN(columns, *numbers, seen, types.int64), code


@intrinsic
def largest_of_group(typing: Any, columns: Any, begin: Any, bits: Any) -> tuple[Any, Any]:
    """The largest gain as the shorter job of those of a group whose bit is set; from its turned row, too."""

    def code(context: Any, build: Any, signature: Any, args: Any) -> Any:
        columns, begin, bits = args
        lines = _lines(context, build, signature.args[0], columns, begin, 4)
        return _reduce(build, "fmax", _largest_by_lane(build, _chosen(build, lines, bits)))

    return types.float64(columns, types.int64, types.int64), code


@intrinsic
def lowest_bit(typing: Any, bits: Any) -> tuple[Any, Any]:
    """The place of the lowest bit that is set; one must be."""
    return types.int64(types.int64), lambda context, build, signature, args: _lowest(build, args[0])


@intrinsic
def highest_bit(typing: Any, bits: Any) -> tuple[Any, Any]:
    """The place of the highest bit that is set; one must be."""

    def code(context: Any, build: Any, signature: Any, args: Any) -> Any:
        return build.sub(ir.Constant(_INT, 63), build.ctlz(args[0], ir.Constant(ir.IntType(1), 1)))

    return types.int64(types.int64), code


# -- what they are made of ----------------------------------------------------------------------------------


def _number(value: Any) -> Any:
    return ir.Constant(_INT, value) if isinstance(value, int) else value


def _place(build: Any, found: Any, row: Any, column: Any, kind: Any) -> Any:
    """Where vectors of this kind begin in a two-dimensional array."""
    width = build.extract_value(found.shape, 1)
    place = build.gep(found.data, [build.add(column, build.mul(_number(row), width))], source_etype=_FLOAT)
    return build.bitcast(place, kind.as_pointer())


def _rows(context: Any, build: Any, kind: Any, array: Any, begin: Any, rows: Iterable[Any]) -> list[Any]:
    """Eight columns from `begin` on of some rows of a two-dimensional array."""
    found = context.make_array(kind)(context, build, array)
    return [build.load(_place(build, found, row, begin, _FLOATS), align=8) for row in rows]


def _lines(context: Any, build: Any, kind: Any, array: Any, begin: Any, row: Any) -> list[list[Any]]:
    """Of a group, turned: eight lines, in which a lane has a block's candidate, in halves."""
    place = _place(build, context.make_array(kind)(context, build, array), row, begin, _HALF_FLOATS)
    halves = [
        build.load(build.gep(place, [_number(i)], source_etype=_HALF_FLOATS), align=8)
        for i in range(GROUP // _HALF)
    ]
    return [halves[i : i + 2] for i in range(0, len(halves), 2)]


def _chosen(build: Any, lines: list[list[Any]], bits: Any) -> list[list[Any]]:
    """Of a group, turned: the values whose bit is set, and the lowest number where it is not."""
    octets = build.bitcast(bits, ir.VectorType(ir.IntType(8), LANES))
    lowest, zero = ir.Constant(_HALF_FLOATS, [float("-inf")] * _HALF), ir.Constant(_HALF_INTS, [0] * _HALF)
    words = [build.zext(_part(build, octets, half), _HALF_INTS) for half in range(2)]
    chosen = []
    for i, line in enumerate(lines):
        # A bit where the sign is: that is what instructions that choose look at.
        to_sign = ir.Constant(_HALF_INTS, [63 - i] * _HALF)
        signs = (build.icmp_signed("<", build.shl(word, to_sign), zero) for word in words)
        chosen.append([build.select(sign, values, lowest) for sign, values in zip(signs, line)])
    return chosen


def _part(build: Any, values: Any, half: int) -> Any:
    places = [half * _HALF + lane for lane in range(_HALF)]
    return build.shuffle_vector(values, values, ir.Constant(ir.VectorType(ir.IntType(32), _HALF), places))


def _largest_by_lane(build: Any, lines: list[list[Any]]) -> Any:
    while len(lines) > 1:
        pairs = zip(lines[::2], lines[1::2])
        lines = [[_larger(build, x, y) for x, y in zip(a, b)] for a, b in pairs]
    whole = ir.Constant(ir.VectorType(ir.IntType(32), LANES), list(range(LANES)))
    return build.shuffle_vector(*lines[0], whole)


def _all(build: Any, value: Any, kind: Any) -> Any:
    """The same value in all lanes."""
    nothing = ir.Constant(kind, ir.Undefined)
    one = build.insert_element(nothing, value, ir.Constant(ir.IntType(32), 0))
    return build.shuffle_vector(one, nothing, ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES))


def _bits(build: Any, lanes: Any) -> Any:
    return build.zext(build.bitcast(lanes, ir.IntType(LANES)), _INT)


def _lanes(build: Any, bits: Any) -> Any:
    return build.bitcast(build.trunc(bits, ir.IntType(LANES)), ir.VectorType(ir.IntType(1), LANES))


def _of_those_after(build: Any, values: Any, rest: Any) -> Any:
    """In each lane the largest of those in the lanes after it, and of the rest."""
    values = _shifted(build, values, 1)
    for by in (1, 2, 4):
        values = _larger(build, values, _shifted(build, values, by))
    return _larger(build, values, rest)


def _shifted(build: Any, values: Any, by: int) -> Any:
    """Each lane has what was in the lane so many after it; the last ones have the lowest number."""
    places = ir.Constant(ir.VectorType(ir.IntType(32), LANES), list(range(by, LANES + by)))
    return build.shuffle_vector(values, _LOWEST, places)


def _larger(build: Any, a: Any, b: Any) -> Any:
    return build.select(build.fcmp_ordered(">", a, b), a, b)


def _lowest(build: Any, bits: Any) -> Any:
    return build.cttz(bits, ir.Constant(ir.IntType(1), 1))


def _first(build: Any, passes: Any, skip: Any) -> Any:
    """The first lane from `skip` on that passes, or LANES."""
    asked = build.and_(_bits(build, passes), build.shl(ir.Constant(_INT, -1), skip))
    return _lowest(build, build.or_(asked, ir.Constant(_INT, 1 << LANES)))


def _best(build: Any, lengths: Any, shorts: Any, longs: Any, above: Any) -> list[Any]:
    rows = zip(("fmin", "fmax", "fmax", "fmin"), (lengths, shorts, longs, above))
    return [_reduce(build, how, values) for how, values in rows]


def _reduce(build: Any, how: str, values: Any) -> Any:
    name = f"llvm.vector.reduce.{how}.v{LANES}f64"
    kind = ir.FunctionType(_FLOAT, [_FLOATS])
    function = cgutils.get_or_insert_function(build.module, kind, name)
    return build.call(function, [values], fastmath=("nnan", "nsz"))
