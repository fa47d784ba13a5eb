"""What all tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.fixture
def shared_data():
    """The published traces and tables beside the repository; tests that need them skip where they are not."""
    if not SHARED.is_dir():
        pytest.skip(f"the published traces are not at {SHARED}")
    return SHARED
