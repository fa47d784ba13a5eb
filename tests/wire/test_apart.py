"""When two workers' scripts have come apart, and when one is only later than the other."""

from __future__ import annotations

import pytest

from shoal.wire.apart import difference
from shoal.wire.messages import Phase, Status


def at(arrived: int, exchanges: int = 0, phase: Phase = Phase.ACTIVE, generation: int = 3) -> Status:
    return Status(1, phase, generation, ("w0", "w1"), arrived=arrived, exchanges=exchanges)


CASES = {
    "one is a step behind": (at(5), at(6), None),
    "one is a step and an exchange behind": (at(5, 1), at(6, 2), None),
    "one has entered an exchange that the other completes next": (at(5, 2), at(5, 1), None),
    "one waits in an exchange that the other has passed by": (
        at(5, 2),
        at(6, 1),
        "w0 waits for a value of w1",
    ),
    "both have ended after the same step": (at(5, phase=Phase.FINISHED), at(5, phase=Phase.FINISHED), None),
    "one has ended and the other is still behind": (at(5), at(6, phase=Phase.FINISHED), None),
    "one has ended and the other goes on": (at(5, phase=Phase.FINISHED), at(6), "w0 ended after step 5"),
    "one has ended and the other's next step broke": (
        *(at(5, phase=Phase.FINISHED), at(6, phase=Phase.HALTED)),
        "w1 went on to step 6",
    ),
    "one has ended and the other waits for its value": (
        *(at(5, 1, phase=Phase.FINISHED), at(5, 2)),
        "w0 ended after step 5, and w1 went on and waits for a value of it",
    ),
    "one has ended and the other's exchange broke": (
        *(at(5, 1, phase=Phase.FINISHED), at(5, 2, phase=Phase.HALTED)),
        "w1 went on and waits for a value of it",
    ),
    "one has ended and the other exchanges values after its end": (
        *(at(5, 1, phase=Phase.FINISHED), at(5, 2, phase=Phase.FINISHED)),
        None,
    ),
    "one has ended and the other is in the exchanges before that": (
        *(at(5, 2, phase=Phase.FINISHED), at(5, 1, phase=Phase.HALTED)),
        None,
    ),
    "an exchange of the generation of the survivors is not one that the ended worker left out": (
        *(at(5, 1, phase=Phase.FINISHED), at(5, 2, generation=4)),
        None,
    ),
    "counts of two generations cannot be compared": (at(5, 2), at(6, 0, generation=4), None),
}


@pytest.mark.parametrize("name", CASES)
def test_workers_are_apart_only_if_they_can_never_meet_again(name: str):
    one, other, expected = CASES[name]
    why = difference("w0", one, "w1", other)
    assert why is None if expected is None else expected in (why or "")
