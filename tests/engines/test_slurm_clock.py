"""The clock of slurmctld, as sdiag tells it or does not."""

import time

import pytest

from shoal.engines.slurm_clock import ControllerClock

DAY_S = 86400.0


def sdiag(controller_s: float) -> str:
    return f"*******\nsdiag output at Thu Nov 19 04:00:00 2026 ({controller_s:.0f})\nData since ...\n"


def test_until_it_is_read_the_clock_is_that_of_this_machine() -> None:
    clock = ControllerClock()
    clock.read("sdiag: error: access denied")
    assert clock.ahead_s is None
    assert clock.monotonic(time.time() + 30) == pytest.approx(time.monotonic() + 30, abs=5)


def test_a_failed_reading_keeps_the_last_one() -> None:
    clock = ControllerClock()
    clock.read(sdiag(time.time() + DAY_S))
    clock.read("")
    assert clock.ahead_s == pytest.approx(DAY_S, abs=5)
    assert clock.monotonic(time.time() + DAY_S + 30) == pytest.approx(time.monotonic() + 30, abs=5)
