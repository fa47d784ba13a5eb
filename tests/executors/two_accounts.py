"""Two accounts of this machine for tests. They are made for the time of the tests, and need root."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def two_accounts() -> Iterator[tuple[str, str]]:
    """Each is also in a group of its own, NAME-g."""
    if os.geteuid() != 0 or shutil.which("useradd") is None:
        pytest.skip("needs root and useradd, to make accounts")
    names = (f"shoalt{os.getpid()}a", f"shoalt{os.getpid()}b")
    try:
        for name in names:
            subprocess.run(["groupadd", f"{name}-g"], check=True, capture_output=True)
            made = ["useradd", "-M", "-N", "-s", "/bin/sh", "-G", f"{name}-g", name]
            subprocess.run(made, check=True, capture_output=True)
        yield names
    finally:
        for name in names:
            subprocess.run(["userdel", name], check=False, capture_output=True)
            subprocess.run(["groupdel", f"{name}-g"], check=False, capture_output=True)


@contextlib.contextmanager
def open_directory() -> Iterator[Path]:
    """A directory that other accounts can enter. Those of pytest are closed to them."""
    path = Path(tempfile.mkdtemp(prefix="shoal-open-", dir="/tmp"))
    path.chmod(0o711)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def python_for_all() -> str:
    """A Python that other accounts may run. That of the tests may be in root's home."""
    found = "/usr/bin/python3"
    if not Path(found).exists():
        pytest.skip("needs /usr/bin/python3")
    return found
