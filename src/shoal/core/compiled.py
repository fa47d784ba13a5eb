"""How kernels are compiled: once, cached on disk, and without wrappers that nothing uses.

The wrapper that makes a kernel callable from Python or C takes about as long to compile as a short kernel.

Numba invalidates a cached kernel when its own file changes, not when the file of a function that it calls
does. After editing such a function, or this file, delete the `.nbi` files below `src`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from numba import njit

# Only the result is typed. The arguments are of more integer sizes than annotations say; numba checks them.
Result = TypeVar("Result")


def kernel(function: Callable[..., Result]) -> Callable[..., Result]:
    """A kernel that Python and other kernels call."""
    compiled: Callable[..., Result] = njit(cache=True, no_cfunc_wrapper=True)(function)
    return compiled


def inner(function: Callable[..., Result]) -> Callable[..., Result]:
    """A kernel that only kernels of the same file call. It has no Python wrapper: a call from Python crashes."""
    compiled: Callable[..., Result] = njit(cache=True, no_cfunc_wrapper=True, no_cpython_wrapper=True)(
        function
    )
    return compiled


def inlined(function: Callable[..., Result]) -> Callable[..., Result]:
    """A function that is inlined into the kernels that call it."""
    compiled: Callable[..., Result] = njit(cache=True, inline="always")(function)
    return compiled
