"""How kernels are compiled: once, and without what nobody uses.

A way in from Python or C takes about as long to compile as a short kernel itself; counting references to arrays
takes longer than many a small function that is given them.

A compiled kernel is kept while its own file stands unchanged. Who edits a function that kernels of other files
contain, or this file, deletes the `.nbi` files below `src` before measuring or testing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from numba import njit

# Only results are typed: numbers come in more sizes than annotations say, and are checked as kernels are compiled.
Result = TypeVar("Result")


def kernel(function: Callable[..., Result]) -> Callable[..., Result]:
    """Called from Python, and by other kernels."""
    compiled: Callable[..., Result] = njit(cache=True, no_cfunc_wrapper=True)(function)
    return compiled


def inner(function: Callable[..., Result]) -> Callable[..., Result]:
    """Called by kernels of the same file only: there is no way in from Python, and trying ends the process."""
    compiled: Callable[..., Result] = njit(cache=True, no_cfunc_wrapper=True, no_cpython_wrapper=True)(
        function
    )
    return compiled


def borrower(function: Callable[..., Result]) -> Callable[..., Result]:
    """As `inner`, and given all arrays that it uses: the caller keeps them alive, it makes none and counts nothing."""
    compiled: Callable[..., Result] = njit(
        cache=True, no_cfunc_wrapper=True, no_cpython_wrapper=True, _nrt=False
    )(function)
    return compiled


def inlined(function: Callable[..., Result]) -> Callable[..., Result]:
    """Becomes a part of the kernels that call it."""
    compiled: Callable[..., Result] = njit(cache=True, inline="always")(function)
    return compiled
