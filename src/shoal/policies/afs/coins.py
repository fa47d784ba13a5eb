"""The coins of AFS-P, and what decides instead where none are tossed."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

#: What decides where lengths would: a coin, the order of the fold, or the larger `short`. Who wins whatever the lengths
#: has that, too, so the last is an order, and the largest wins without a fold, the first of equals.
BY_COIN, FIRST, LAST, LARGEST = 1, 2, 3, 4

_INT = ir.IntType(64)


@intrinsic
def coins(typing: Any, tie: Any, nonce: Any, gpu: Any, word: Any) -> tuple[Any, Any]:
    """64 coins, a bit each, of challengers at places from 64 * word on: set if heads, for the challenger.

    Places are counted among those that play. The same for the same arguments, a 64-bit mix of all of them: splitmix64
    (Steele et al., OOPSLA'14), from the nonce so many steps on as the GPU, in the upper half of a word, and the place
    say. Written in LLVM's terms, like `lanes`: as Python it would be compiled once more wherever it is used.
    """

    def code(context: Any, build: Any, signature: Any, args: Any) -> Any:
        def number(value: int) -> Any:
            return ir.Constant(_INT, value)

        tie, nonce, gpu, word = args
        place = build.or_(build.shl(gpu, number(32)), word)
        x = build.add(nonce, build.mul(place, number(0x9E3779B97F4A7C15)))
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            x = build.mul(build.xor(x, build.lshr(x, number(shift))), number(factor))
        x = build.xor(x, build.lshr(x, number(31)))
        none = build.select(build.icmp_signed("==", tie, number(LAST)), number(-1), number(0))
        return build.select(build.icmp_signed("==", tie, number(BY_COIN)), x, none)

    return types.int64(*(types.int64,) * 4), code
