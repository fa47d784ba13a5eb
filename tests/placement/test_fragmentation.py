"""The fragmentation figure on cases counted by hand."""

from __future__ import annotations

import numpy as np
import pytest

from shoal.placement.fragmentation import fragmentation, free_gpus


@pytest.mark.parametrize(
    ("free", "size", "figure"),
    [
        ([4, 4], 4, 0.0),
        ([3, 1], 4, 1.0),
        ([3, 1], 2, 0.5),  # one pair of four GPUs
        ([3, 1], 1, 0.0),
        ([4, 2, 2], 4, 0.5),
        ([0, 0], 4, 0.0),
    ],
)
def test_fragmentation_is_the_part_of_the_free_gpus_that_such_jobs_cannot_use(free, size, figure):
    assert fragmentation(np.array(free), size) == pytest.approx(figure)


def test_free_gpus_are_what_the_placements_leave():
    assert free_gpus(np.array([4, 4]), [((0, 3),), ((0, 1), (1, 2))]).tolist() == [0, 2]
