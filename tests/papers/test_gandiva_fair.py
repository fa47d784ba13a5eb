"""The words under the figures of the Gandiva_fair slides hold for whatever the figures are."""

from __future__ import annotations

import pytest

from shoal.sim.papers.gandiva_fair import render


@pytest.mark.parametrize(
    ("received", "shown"),
    [(99.0, "-1.00 %"), (100.42, "+0.42 %"), (100.0, "+0.00 %")],
    ids=["less than its part", "more than its part", "its part"],
)
def test_a_users_difference_is_explained_whatever_its_sign(received, shown):
    hours = {
        "user1": {"entitled": 100.0, "received": received},
        "user2": {"entitled": 100.0, "received": 99.5},
    }
    text = render({"homogeneous": {"gpus": 48, "gpu_hours": hours}, "trading": []})
    assert shown in text
    assert "for all" not in text
    assert "(below 0: GPUs on which none of the user's waiting gangs fits" in text
    assert "above 0: GPUs on which no other user's gang fits" in text
