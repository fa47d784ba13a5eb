"""The optional parts of Shoal, and the error of a command whose part is not installed."""

from __future__ import annotations

import re
from importlib import metadata

from shoal.core.errors import ShoalError

#: Extras in pyproject.toml that commands need, as error messages name them.
EXTRAS = {"server": "the server", "sim": "the simulator"}


def require(command: str, *extras: str) -> None:
    """Raise an error that names the first of `extras` unless all packages of one of them are installed."""
    if not any(all(map(_installed, packages_of(extra))) for extra in extras):
        raise ShoalError(f"{command} needs {EXTRAS[extras[0]]}: pip install 'shoal[{extras[0]}]'")


def packages_of(extra: str) -> list[str]:
    """The packages that an extra adds, by the metadata of the installed distribution."""
    try:
        requirements = metadata.requires("shoal") or []
    except metadata.PackageNotFoundError:  # imported from a source tree that is not installed
        return []
    marked = re.compile(rf"""extra == ['"]{re.escape(extra)}['"]""")
    return [re.split(r"[^\w.-]", text, maxsplit=1)[0] for text in requirements if marked.search(text)]


def _installed(package: str) -> bool:
    try:
        metadata.distribution(package)
    except metadata.PackageNotFoundError:
        return False
    return True
