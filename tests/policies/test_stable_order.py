"""Sorting in kernels is numpy's stable sort."""

from __future__ import annotations

import numpy as np
import pytest

from shoal.core.stable_order import stable_order


@pytest.mark.parametrize("count", [0, 1, 2, 15, 16, 17, 31, 33, 64, 257, 1000])
def test_it_equals_numpys_stable_order_with_many_equal_keys_and_infinities(count: int) -> None:
    rng = np.random.default_rng(count)
    for few in (2, 10, 10_000):
        keys = rng.integers(0, few, count).astype(float)
        keys[rng.random(count) < 0.1] = np.inf
        keys[rng.random(count) < 0.1] = -np.inf
        assert stable_order(keys).tolist() == np.argsort(keys, kind="stable").tolist()
