"""Modules of the light installation import none of the packages that only the server and the simulator need."""

import subprocess
import sys

import pytest

HEAVY = [
    "numpy",
    "scipy",
    "numba",
    "sklearn",
    "polars",
    "fastapi",
    "starlette",
    "uvicorn",
    "sqlalchemy",
    "alembic",
    "jinja2",
    "matplotlib",
    "torch",
]

LIGHT = ["shoal.cli", "shoal.client", "shoal.wire", "shoal.executors", "shoal.server.api.models"]

SIM_ONLY = ["polars", "jinja2", "matplotlib"]

IMPORT_ALL = """
import importlib, pkgutil, sys
package = importlib.import_module(sys.argv[1])
for found in pkgutil.walk_packages(getattr(package, "__path__", []), sys.argv[1] + "."):
    importlib.import_module(found.name)
print(*(name for name in sys.argv[2:] if name in sys.modules))
"""


@pytest.mark.parametrize("package", LIGHT)
def test_a_light_package_imports_no_heavy_one(package):
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, package, *HEAVY], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []


def test_the_server_needs_no_package_of_the_simulator():
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, "shoal.server.control", *SIM_ONLY],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.split() == []
