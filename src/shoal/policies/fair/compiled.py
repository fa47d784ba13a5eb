"""How the kernels of fair sharing are compiled: once, and without ways in that nobody uses.

A way in from Python or C takes about as long to compile as a short kernel itself.
"""

from __future__ import annotations

from numba import njit

#: Called from Python, and by other kernels.
kernel = njit(cache=True, no_cfunc_wrapper=True)
#: Called by other kernels only, of the same file: there is no way in from Python, and trying ends the process.
inner = njit(cache=True, no_cfunc_wrapper=True, no_cpython_wrapper=True)
