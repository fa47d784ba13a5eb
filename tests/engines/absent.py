"""What a test does when this machine lacks what it needs."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import NoReturn

import pytest


def skip(why: str) -> NoReturn:
    """Skip the test. In CI it fails: there a test that is skipped would be missed by nobody."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"{why} (CI=true: this must be there)", pytrace=False)
    pytest.skip(why)


def need_ray() -> None:
    if find_spec("ray") is None:
        skip("NO RAY TESTS: pip install 'shoal[ray]'")
