"""Kernels that cannot be called from Python are those that are not: it would end the process."""

import importlib
import pkgutil

from numba.core.dispatcher import Dispatcher

from shoal.policies import gandiva_fair as fair


def test_kernels_without_a_way_in_from_python_are_private_to_the_kernels_of_their_file():
    closed = set()
    for module in pkgutil.iter_modules(fair.__path__, f"{fair.__name__}."):
        for name, found in vars(importlib.import_module(module.name)).items():
            if isinstance(found, Dispatcher) and found.targetoptions.get("no_cpython_wrapper"):
                assert name.startswith("_")
                assert found.py_func.__module__ == module.name
                closed.add(name)
    assert len(closed) > 10
