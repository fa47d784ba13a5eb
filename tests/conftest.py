"""What all tests share."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import hypothesis
import pytest

# A shell that starts the tests in the background has them, and all that they start, ignore Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # nohup does this
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Tables are as wide as a test says, not as the terminal in which the tests were started.
os.environ.pop("COLUMNS", None)

# Machines are shared and slow at times: no example fails because of its duration.
hypothesis.settings.register_profile("shoal", deadline=None)
hypothesis.settings.load_profile("shoal")

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.fixture
def shared_data():
    """The published traces and tables beside the repository; tests that need them skip where they are not."""
    if not SHARED.is_dir():
        pytest.skip(f"the published traces are not at {SHARED}")
    return SHARED
